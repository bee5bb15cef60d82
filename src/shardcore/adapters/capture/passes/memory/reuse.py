"""Saves memory: drops copies, and writes results into the memory of dead operands."""

from collections.abc import Collection, Mapping
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.analyses import last_uses
from shardcore.adapters.capture.passes.cleanup import without_dead_code
from shardcore.adapters.capture.rewriting import renamed, rewritten
from shardcore.adapters.capture.tape import Call, Form, Tape, Value, values

_CLONE: Any = torch.ops.aten.clone.default
_PERMUTE = torch.ops.aten.permute.default
# These take images in either memory format, with their channels first or last.
_POOLING = {
    torch.ops.aten.max_pool2d_with_indices.default,
    torch.ops.aten.max_pool2d_with_indices_backward.default,
    torch.ops.aten.avg_pool2d.default,
    torch.ops.aten.avg_pool2d_backward.default,
}


def without_needless_copies(tape: Tape) -> Tape:
    """Returns `tape` with fewer copies that differ from their originals in strides alone.

    A copy back is the original. A pointwise operator reads the operand that has the strides of its
    result. Pooling reads images with their channels last, which Keras (3.15) copies to have them
    first: the smaller results are copied instead. Values and indices are the same.

    A copy stays if a call writes into it, or if the step returns it.
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
            call = attrs.evolve(call, args=_as_result(call, originals, found))
        return call

    return without_dead_code(rewritten(tape, rewrite))


def _turned(original: Value, call: Call, tape: Tape) -> Call:
    """Returns `call`, a permutation of a copy, applied to the original."""
    form, dims = tape.form(original), call.args[1]
    strides = tuple(form.strides[dim] for dim in dims)
    turned = attrs.evolve(tape.form(call.result), strides=strides)
    result = tape.new(turned, tape.memory[original.number])
    return attrs.evolve(call, args=(original, dims), result=result)


def _as_result(call: Call, originals: Mapping[Value, Value], tape: Tape) -> tuple[Any, ...]:
    """Returns the operands of a pointwise call: originals, if all have its result's strides."""
    args, forms = _uncopied(call, originals, tape)
    own = tape.form(call.result) if isinstance(call.result, Value) and not call.writes else None
    is_alike = own and {(each.shape, each.strides) for each in forms} <= {(own.shape, own.strides)}
    return args if is_alike else call.args


def _pooled(call: Call, originals: dict[Value, Value], fixed: Collection[int], tape: Tape) -> Call:
    """Returns the last call of those that pool originals, if all have their channels last.

    The others are added to `tape`, and the results to `originals`.
    """
    args, operands = _uncopied(call, originals, tape)
    results = [tape.form(each) for each in call.results]
    are_last = all(each.strides == _channels_last(each) for each in operands)
    if args == call.args or not are_last or not all(each.is_dense for each in results):
        return call
    last_forms = {
        value: tape.new(attrs.evolve(form, strides=_channels_last(form)))
        for value, form in zip(call.results, results, strict=True)
    }
    free = (each for each in last_forms if tape.memory[each.number] not in fixed)
    originals.update((each, last_forms[each]) for each in free)
    first = {"memory_format": torch.contiguous_format}
    *others, last = (
        Call(_CLONE, (last_forms[each],), first, each, (), call.line) for each in last_forms
    )
    pooled = attrs.evolve(call, args=args, result=renamed(call.result, last_forms))
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


def with_operands_reused(tape: Tape) -> Tape:
    """Returns `tape` with results in the memory of dead operands.

    An all-reduce is done in place, where torch's would copy its operand. On a CPU, so are operators
    that read each element before they write it. Inductor does the same by itself.
    """
    uses, uses_and_sends = last_uses(tape), last_uses(tape, sends=True)

    def rewrite(call: Call, found: Tape) -> Call:
        place = len(found.calls)
        recorded = tape.calls[place]  # with the operands that uses were counted of
        if call.is_all_reduce:
            operand = recorded.args[0]
            if not tape.form(operand).is_dense or uses.get(tape.memory[operand.number]) != place:
                return call
            return _writing(call, torch_private.all_reduce_in_place(), call.args[0], {})
        ended = {each for each in tape.reads_of(recorded) if uses_and_sends.get(each) == place}
        targets = zip(_overwritable(recorded), _overwritable(call), strict=True)
        target = next((new for old, new in targets if _fits(old, recorded, ended, tape)), None)
        variant = None if target is None else torch_private.writing_into(call.operator)
        if variant is None:
            return call
        return _writing(call, variant[0], target, {variant[1]: target})

    return rewritten(tape, rewrite)


def _writing(call: Call, operator: Any, target: Any, kwargs: dict[str, Any]) -> Call:
    """Returns `call` by an operator that writes its result into `target`."""
    named = call.kwargs | kwargs
    return attrs.evolve(call, operator=operator, kwargs=named, result=target, writes=(target,))


def _overwritable(call: Call) -> tuple[Value, ...]:
    """Returns the operands of which `call` reads no element after it has written there."""
    if call.writes or not isinstance(call.result, Value):
        return ()
    if call.operator in torch_private.SOFTMAX_BACKWARD:
        return call.args[:1]  # a row is summed first, then read once more element by element
    is_pointwise = torch.Tag.pointwise in getattr(call.operator, "tags", ())
    draws = is_pointwise and call.draws
    return call.operands if is_pointwise and not draws else ()


def _fits(operand: Value, call: Call, ended: set[int], tape: Tape) -> bool:
    """Returns whether the result of `call` fits into `operand`, and no later call reads that."""
    memory, form = tape.memory[operand.number], tape.form(call.result)
    whole = tape.forms[memory]
    views = {value for value in call.operands if tape.memory[value.number] == memory}
    return (
        memory in ended
        and views == {operand}
        and tape.forms[operand.number] == form
        and form.is_dense
        and form.device.type == "cpu"
        and whole is not None
        and whole.bytes == form.bytes
    )
