"""Arithmetic on what is expanded, which need be done once and not for each row."""

from typing import Any

import attrs
import torch

from shardcore.adapters.capture.constants import written_memories
from shardcore.adapters.capture.passes.dead_code import without_dead_code
from shardcore.adapters.capture.passes.pooling import CLONE
from shardcore.adapters.capture.tape import Call, Form, Tape, Value, values


def with_late_expands(tape: Tape) -> Tape:
    """What is expanded and then divided, as the gradient of a mean is, is divided first.

    The parts of it, and copies of them, are parts of the expanded then. A pointwise call reads
    these, if its result lies as before. Only arithmetic on real numbers is moved: that is rounded
    alike in every loop.
    """
    found = tape.with_calls([])
    written = written_memories(tape)
    expanded: dict[Value, Value] = {}
    for call in tape.calls:
        if not tape.writes_of(call) & written:
            found.calls += _expanded_later(call, expanded, written, found)
        args = _as_expanded(call, expanded, found)
        found.calls.append(attrs.evolve(call, args=args))
    return without_dead_code(found)


def _expanded_later(
    call: Call, expanded: dict[Value, Value], written: set[int], tape: Tape
) -> list[Call]:
    """What makes the results of `call` anew, as what is expanded; `expanded` then names them."""
    if call.operator is CLONE:
        own = expanded.get(call.args[0], call.args[0])
        if _expanded_dims(tape.form(own)) and tape.memory[own.number] not in written:
            expanded[call.result] = own
    elif call.operator in _PARTS and call.args[0] in expanded:
        whole = expanded[call.args[0]]
        parts = [_part(each, whole, tape) for each in call.result]
        expanded |= zip(call.result, parts, strict=True)
        return [attrs.evolve(call, args=(whole, *call.args[1:]), result=parts)]
    elif call.operator in _ARITHMETIC:
        swapped = attrs.evolve(call, args=_swapped(call, expanded))
        if dims := _common_dims(swapped, tape):
            return _done_first(swapped, dims, expanded, tape)
    return []


def _common_dims(call: Call, tape: Tape) -> set[int]:
    """The dims over which all operands are expanded, but for plain numbers."""
    shape = tape.form(call.result).shape
    forms = [form for form in map(tape.form, call.operands) if form.shape]
    if not forms or any(form.shape != shape or form.dtype.is_complex for form in forms):
        return set()
    return set.intersection(*map(_expanded_dims, forms))


def _expanded_dims(form: Form) -> set[int]:
    sizes = zip(form.shape, form.strides, strict=True)
    return {dim for dim, (size, stride) in enumerate(sizes) if size > 1 and stride == 0}


def _done_first(call: Call, dims: set[int], expanded: dict[Value, Value], tape: Tape) -> list[Call]:
    """`call` of one row, and the result expanded."""
    form = tape.form(call.result)
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(form.shape))
    calls: list[Call] = []

    def row(arg: Any) -> Any:
        if not isinstance(arg, Value) or not tape.form(arg).shape:
            return arg
        lies = attrs.evolve(tape.form(arg), shape=shape)
        first = tape.new(lies, tape.memory[arg.number])
        args = arg, list(shape), list(lies.strides)
        calls.append(Call(torch.ops.aten.as_strided.default, args, {}, first, (), call.line))
        return first

    args = tuple(map(row, call.args))
    result = tape.new(Form(shape, form.dtype, form.device))
    strides = tape.form(result).strides
    strides = tuple(0 if dim in dims else stride for dim, stride in enumerate(strides))
    whole = tape.new(attrs.evolve(form, strides=strides), result.number)
    expand = Call(_EXPAND, (result, list(form.shape)), {}, whole, (), call.line)
    expanded[call.result] = whole
    return [*calls, attrs.evolve(call, args=args, result=result), expand]


def _part(part: Value, whole: Value, tape: Tape) -> Value:
    form = attrs.evolve(tape.form(part), strides=tape.form(whole).strides)
    return tape.new(form, tape.memory[whole.number])


def _as_expanded(call: Call, expanded: dict[Value, Value], tape: Tape) -> tuple[Any, ...]:
    """The operands of a pointwise call, expanded, if its result then lies as it did."""
    swapped = _swapped(call, expanded)
    if swapped == call.args or call.writes or not isinstance(call.result, Value):
        return call.args
    if torch.Tag.pointwise not in getattr(call.operator, "tags", ()):
        return call.args
    form = tape.form(call.result)
    others = [tape.form(each) for each in swapped if each in set(values(call.args))]
    like_it = [(each.shape, each.strides) == (form.shape, form.strides) for each in others]
    is_told = all(
        like or each.elements == max(each.shape, default=1)
        for like, each in zip(like_it, others, strict=True)
    )
    return swapped if form.is_dense and any(like_it) and is_told else call.args


def _swapped(call: Call, expanded: dict[Value, Value]) -> tuple[Any, ...]:
    return tuple(expanded.get(arg, arg) if isinstance(arg, Value) else arg for arg in call.args)


_EXPAND: Any = torch.ops.aten.expand.default
_PARTS: set[Any] = {
    torch.ops.aten.chunk.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
}
_ARITHMETIC: set[Any] = {
    torch.ops.aten.add.Tensor,
    torch.ops.aten.div.Scalar,
    torch.ops.aten.div.Tensor,
    torch.ops.aten.mul.Scalar,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.neg.default,
    torch.ops.aten.sub.Tensor,
}
