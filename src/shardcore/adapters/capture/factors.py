"""What an operator multiplies an operand by, for steps that Inductor compiles."""

from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Call, Number, Tape, Value


def with_factors_apart(tape: Tape) -> Tape:
    """`add(x, y, alpha=factor)` is `add(x, y * factor)`.

    Inductor takes no number of a tensor; and torch 2.13 forgets any factor where `y` is a matrix
    product, in silence, as it makes `addmm` of both: https://github.com/pytorch/pytorch/issues/167313
    tells of the same. The product is rounded, which the sum alone would not do: the last bit may be
    another one.
    """
    found = tape.with_calls([])
    for call in tape.calls:
        factor = call.kwargs.get("alpha")
        if isinstance(factor, Number) or (factor is not None and _is_sum_of_two(call)):
            scaling = _scaled(call, factor, found)
            found.calls.append(scaling)
            args = (call.args[0], scaling.result, *call.args[2:])
            rest = {name: each for name, each in call.kwargs.items() if name != "alpha"}
            call = attrs.evolve(call, args=args, kwargs=rest)  # noqa: PLW2901 - it is that call
        found.calls.append(call)
    return found


def _is_sum_of_two(call: Call) -> bool:
    sums = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
    return call.operator in sums and isinstance(call.args[1], Value)


def _scaled(call: Call, factor: Any, tape: Tape) -> Call:
    """The second operand of `call`, a tensor or a list of them, times the factor."""
    operand = call.args[1]
    is_list = isinstance(operand, list)
    operator = torch_compat.LIST_TIMES if is_list else torch.ops.aten.mul.Tensor
    made = torch_compat.tree_map(lambda value: tape.new(tape.form(value)), operand)
    by = factor.value if isinstance(factor, Number) else factor
    return Call(operator, (operand, by), {}, made, (), call.line)
