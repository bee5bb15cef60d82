"""Products by oneDNN, for steps that Inductor compiles, which may have other bits."""

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Call, Tape

# Multiplications. Of fewer, a product takes little more than its call.
LARGE = 2**24


def with_onednn_products(tape: Tape, onednn: torch_compat.OneDnn) -> Tape:
    """`tape` with its large products of float32 on a CPU by oneDNN.

    Measured on an AMD EPYC with AVX-512, one thread: 80 to 105 billion operations a second, where
    MKL does 64 to 95. On an Intel Xeon MKL is faster, with 139 to 186, by up to a fifth.

    Args:
        tape: A step.
        onednn: Has the operator.
    """
    if not torch_compat.has_onednn() or torch_compat.is_intel():
        return tape
    return tape.with_calls(
        attrs.evolve(call, operator=onednn.product()) if _is_faster(call, tape) else call
        for call in tape.calls
    )


def _is_faster(call: Call, tape: Tape) -> bool:
    """Told by what the operands are, so that all ranks with processors of one kind do the same.

    A first operand that is transposed, as for the gradient of a kernel, stays with MKL: some
    of those products are slower by oneDNN.
    """
    if call.operator not in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
        return False
    left, right = (tape.form(each) for each in call.args)
    is_matrix = len(left.shape) == 2 or left.shape[0] == 1
    is_large = left.elements * right.shape[-1] >= LARGE
    is_plain = left.device.type == "cpu" and left.dtype is torch.float32
    return is_matrix and is_large and is_plain and left.strides[-1] == 1
