"""The floating-point operations of an operator, as torch counts them."""

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


def count_flops(operator: object, operands: Any, result: object) -> int:
    """Counts operations of products, convolutions and attention as torch does; 0 for all else.

    torch counts attention on CUDA only; the operator for CPUs has the same first operands.

    Args:
        operator: An operator of torch, or another function, which counts 0.
        operands: `(args, kwargs)`; of tensors only the shapes are read.
        result: Its result.
    """
    packet: Any = getattr(operator, "overloadpacket", None)
    name = str(packet).rpartition(".")[2]
    if "for_cpu" in name:
        packet = getattr(torch.ops.aten, name.replace("for_cpu", "").replace("__", "_").rstrip("_"))
    formula = flop_registry.get(packet)
    args, kwargs = operands
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
