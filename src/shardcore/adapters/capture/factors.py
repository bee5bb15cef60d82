"""What an operator multiplies an operand by, for steps that Inductor compiles."""

from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Call, Number, Tape, values


def with_factors_apart(tape: Tape) -> Tape:
    """`add(x, y, alpha=factor)` is `add(x, y * factor)`.

    Inductor takes no number of a tensor; and torch 2.13 forgets any factor where `x` or `y` is a
    matrix product, in silence, as it makes `addmm` of both:
    https://github.com/pytorch/pytorch/issues/167313 tells of the same. The product is rounded,
    which the sum alone would not do: the last bit may be another one.
    """
    found = tape.with_calls([])
    for call in tape.calls:
        factor = call.kwargs.get("alpha")
        if factor is not None and _is_taken(call, factor, tape):
            scaling = _scaled(call, factor, found)
            found.calls.append(scaling)
            args = (call.args[0], scaling.result, *call.args[2:])
            rest = {name: each for name, each in call.kwargs.items() if name != "alpha"}
            call = attrs.evolve(call, args=args, kwargs=rest)  # noqa: PLW2901 - it is that call
        found.calls.append(call)
    return found


def _is_taken(call: Call, factor: Any, tape: Tape) -> bool:
    """Whether Inductor would not see to it, and the second operand can be multiplied instead.

    Of operands of two dtypes the product would be rounded to that of the second; Inductor makes no
    `addmm` of them.
    """
    name = torch_compat.aten_name(call.operator)
    if isinstance(factor, Number):
        is_scaling = torch_compat.is_list_operator(call.operator) or name in _SCALING
    else:
        is_scaling = name == "add"
    if not is_scaling:
        return False
    dtypes = {tape.form(value).dtype for value in values(call.args[:2])}
    return len(dtypes) == 1 and bool(values(call.args[1]))


# Operators whose `alpha` is, as that of those on lists, a factor of their second operand.
_SCALING = {"add", "sub", "addmm", "addmv", "addr", "addbmm", "baddbmm"}


def _scaled(call: Call, factor: Any, tape: Tape) -> Call:
    """The second operand of `call`, a tensor or a list of them, times the factor."""
    operand = call.args[1]
    is_list = isinstance(operand, list)
    operator = torch_compat.LIST_TIMES if is_list else torch.ops.aten.mul.Tensor
    made = torch_compat.tree_map(lambda value: tape.new(tape.form(value)), operand)
    by = factor.value if isinstance(factor, Number) else factor
    return Call(operator, (operand, by), {}, made, (), call.line)
