"""Copies that are made for how the elements lie, and which need not be."""

from collections.abc import Collection, Mapping
from typing import Any

import attrs
import torch

from shardcore.adapters.capture.passes.cleanup import without_dead_code
from shardcore.adapters.capture.tape import Call, Form, Tape, Value, renamed, rewritten, values

_CLONE: Any = torch.ops.aten.clone.default
_PERMUTE = torch.ops.aten.permute.default
# They compute images as these lie, with their channels first or last.
_POOLING = {
    torch.ops.aten.max_pool2d_with_indices.default,
    torch.ops.aten.max_pool2d_with_indices_backward.default,
    torch.ops.aten.avg_pool2d.default,
    torch.ops.aten.avg_pool2d_backward.default,
}


def without_needless_copies(tape: Tape) -> Tape:
    """Returns `tape` with fewer copies that differ from their originals in strides alone.

    A copy back is the original. A pointwise operator reads what lies as its result does. Pooling
    reads images whose channels lie last, where Keras (3.15) copies each to have them first: the
    results, which are smaller, are copied instead. The values are the same, and so are the indices,
    of which the first of equals counts.

    Copies stay of what a call writes into, and those that the step returns.
    """
    fixed = tape.overwritten() | tape.memories(values(tape.outputs))
    originals: dict[Value, Value] = {}  # by copy

    def rewrite(call: Call, found: Tape) -> Call | Value:
        original: Value
        if call.operator is _CLONE and not (found.reads_of(call) | found.writes_of(call)) & fixed:
            original = originals.get(call.args[0], call.args[0])
            if found.form(original) == found.form(call.result):
                return original
            originals[call.result] = original
        elif call.operator is _PERMUTE and call.args[0] in originals:
            turned = _turned(originals[call.args[0]], call, found)
            originals[call.result] = turned.result
            found.calls.append(turned)
        elif call.operator in _POOLING:
            call = _pooled(call, originals, fixed, found)
        elif torch.Tag.pointwise in getattr(call.operator, "tags", ()):
            call = attrs.evolve(call, args=_as_it_lies(call, originals, found))
        return call

    return without_dead_code(rewritten(tape, rewrite))


def _turned(original: Value, call: Call, tape: Tape) -> Call:
    """Returns the call that does to the original what `call` does to a copy."""
    form, dims = tape.form(original), call.args[1]
    strides = tuple(form.strides[dim] for dim in dims)
    turned = attrs.evolve(tape.form(call.result), strides=strides)
    result = tape.new(turned, tape.memory[original.number])
    return attrs.evolve(call, args=(original, dims), result=result)


def _as_it_lies(call: Call, originals: Mapping[Value, Value], tape: Tape) -> tuple[Any, ...]:
    """Returns the operands of a pointwise call: originals, if all then lie as its result does."""
    args, forms = _uncopied(call, originals, tape)
    own = tape.form(call.result) if isinstance(call.result, Value) and not call.writes else None
    return args if own and all(_lie_alike(each, own) for each in forms) else call.args


def _lie_alike(form: Form, other: Form) -> bool:
    return (form.shape, form.strides) == (other.shape, other.strides)


def _pooled(call: Call, originals: dict[Value, Value], fixed: Collection[int], tape: Tape) -> Call:
    """Returns the last call of those that pool originals, if all have their channels last.

    The others are added to `tape`, and the results to `originals`.
    """
    args, operands = _uncopied(call, originals, tape)
    results = [tape.form(each) for each in call.results]
    lie_last = all(each.strides == _channels_last(each) for each in operands)
    if args == call.args or not lie_last or not all(each.is_dense for each in results):
        return call
    lying = {
        value: tape.new(attrs.evolve(form, strides=_channels_last(form)))
        for value, form in zip(call.results, results, strict=True)
    }
    free = (each for each in lying if tape.memory[each.number] not in fixed)
    originals.update((each, lying[each]) for each in free)
    first = {"memory_format": torch.contiguous_format}
    *others, last = (Call(_CLONE, (lying[each],), first, each, (), call.line) for each in lying)
    pooled = attrs.evolve(call, args=args, result=renamed(call.result, lying))
    tape.calls += [pooled, *others]
    return last


def _uncopied(
    call: Call, originals: Mapping[Value, Value], tape: Tape
) -> tuple[tuple[Any, ...], list[Form]]:
    """Returns the operands with originals in place of copies, and the forms of the tensors."""
    args = tuple(originals.get(arg, arg) if isinstance(arg, Value) else arg for arg in call.args)
    return args, [tape.form(arg) for arg in args if isinstance(arg, Value)]


def _channels_last(form: Form) -> tuple[int, ...]:
    """Returns the strides of images with their channels last; empty of what are none, or gray."""
    if len(form.shape) != 4 or form.shape[1] == 1:
        return ()
    _, channels, height, width = form.shape
    return (height * width * channels, 1, width * channels, channels)
