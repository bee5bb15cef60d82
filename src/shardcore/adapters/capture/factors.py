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
            args = (call.args[0], _scaled(call, factor, found), *call.args[2:])
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


def _scaled(call: Call, factor: Any, tape: Tape) -> Any:
    """The second operand of `call`, a tensor or a list of them, times the factor, on `tape`."""
    by = factor.value if isinstance(factor, Number) else factor

    def times(value: Any) -> Any:
        result = tape.new(tape.form(value))
        operator = torch.ops.aten.mul.Tensor
        tape.calls.append(Call(operator, (value, by), {}, result, (), call.line))
        return result

    return torch_compat.tree_map(times, call.args[1])
