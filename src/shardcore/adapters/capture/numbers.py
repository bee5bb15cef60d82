"""Numbers that an operator takes out of tensors become arithmetic on those tensors."""

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Call, Number, Tape


def without_numbers(tape: Tape) -> Tape:
    """`add(x, y, alpha=number)` is `add(x, y * tensor)`: Inductor takes no number of a tensor.

    The product is rounded, which the sum alone would not do: the last bit may be another one.
    """
    found = tape.with_calls([])
    for call in tape.calls:
        number = call.kwargs.get("alpha")
        if isinstance(number, Number):
            scaling = _scaled(call, number, found)
            found.calls.append(scaling)
            args = (call.args[0], scaling.result, *call.args[2:])
            rest = {name: each for name, each in call.kwargs.items() if name != "alpha"}
            call = attrs.evolve(call, args=args, kwargs=rest)  # noqa: PLW2901 - it is that call
        found.calls.append(call)
    return found


def _scaled(call: Call, number: Number, tape: Tape) -> Call:
    """The second operand of `call`, a tensor or a list of them, times the tensor of `number`."""
    operand = call.args[1]
    is_list = isinstance(operand, list)
    operator = torch_compat.LIST_TIMES if is_list else torch.ops.aten.mul.Tensor
    made = torch_compat.tree_map(lambda value: tape.new(tape.form(value)), operand)
    return Call(operator, (operand, number.value), {}, made, (), call.line)
