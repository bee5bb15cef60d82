"""Copies that are made for how the elements lie, and which need not be."""

from typing import Any

import attrs
import torch

from shardcore.adapters.capture.constants import written_memories
from shardcore.adapters.capture.passes.cleanup import without_dead_code
from shardcore.adapters.capture.passes.pooling import CLONE
from shardcore.adapters.capture.tape import Call, Form, Tape, Value, renamed, values


def without_needless_copies(tape: Tape) -> Tape:
    """A copy back is what was copied; a pointwise operator reads what lies as its result does.

    Only of what nobody writes into, and of copies that the step does not return.
    """
    found = tape.with_calls([])
    fixed = written_memories(tape) | {tape.memory[value.number] for value in values(tape.outputs)}
    originals: dict[Value, Value] = {}
    names: dict[Value, Value] = {}
    for each in tape.calls:
        args, kwargs = renamed((each.args, each.kwargs), names)
        call = attrs.evolve(each, args=args, kwargs=kwargs)
        if call.operator is CLONE and not (tape.reads_of(call) | tape.writes_of(call)) & fixed:
            original = originals.get(call.args[0], call.args[0])
            if found.form(original) == found.form(call.result):
                names[call.result] = original
                continue
            originals[call.result] = original
        elif call.operator is _PERMUTE and call.args[0] in originals:
            turned = _turned(originals[call.args[0]], call, found)
            originals[call.result] = turned.result
            found.calls.append(turned)
        elif torch.Tag.pointwise in getattr(call.operator, "tags", ()):
            call = attrs.evolve(call, args=_as_it_lies(call, originals, found))
        found.calls.append(call)
    found.share(names)  # what is a view of a copy is one of the original
    return without_dead_code(found)


def _turned(original: Value, call: Call, tape: Tape) -> Call:
    """What `call` does to a copy, done to the original."""
    form, dims = tape.form(original), call.args[1]
    strides = tuple(form.strides[dim] for dim in dims)
    turned = attrs.evolve(tape.form(call.result), strides=strides)
    result = tape.new(turned, tape.memory[original.number])
    return attrs.evolve(call, args=(original, dims), result=result)


def _as_it_lies(call: Call, originals: dict[Value, Value], tape: Tape) -> tuple[Any, ...]:
    """The operands of a pointwise call: the originals, if all then lie as its result does."""
    swapped = tuple(originals.get(arg, arg) if isinstance(arg, Value) else arg for arg in call.args)
    forms = [tape.form(arg) for arg in swapped if isinstance(arg, Value)]
    own = tape.form(call.result) if isinstance(call.result, Value) and not call.writes else None
    return swapped if own and all(_lie_alike(each, own) for each in forms) else call.args


def _lie_alike(form: Form, other: Form) -> bool:
    return (form.shape, form.strides) == (other.shape, other.strides)


_PERMUTE = torch.ops.aten.permute.default
