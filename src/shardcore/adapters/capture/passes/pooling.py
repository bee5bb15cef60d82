"""Pooling of images whose channels lie last, as they do in Keras: torch has it, and faster."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters.capture.constants import written_memories
from shardcore.adapters.capture.tape import Call, Form, Tape, Value


def with_pooling_as_it_lies(tape: Tape) -> Tape:
    """Images that are copied to be pooled are pooled, and the results, which are smaller, copied.

    Keras (3.15) has each image copied with its channels first. The values are the same, and so are
    the indices, of which the first of equals counts.
    """
    found = tape.with_calls([])
    images = _images(tape)
    indices: dict[Value, Value] = {}
    for call in tape.calls:
        if _is_of(call, images, indices, tape):
            lying = [_lying(each, found) for each in call.results]
            found.calls += _instead(call, images | indices, lying)
            indices.update(zip(call.results[1:], lying[1:], strict=True))
        else:
            found.calls.append(call)
    return found


def _images(tape: Tape) -> dict[Value, Value]:
    """By copy, what is copied to have its channels first; nobody writes into either."""
    written = written_memories(tape)
    return {
        call.result: call.args[0]
        for call in tape.calls
        if call.operator is CLONE
        and tape.form(call.result).is_dense
        and tape.form(call.args[0]) == _channels_last(tape.form(call.result))
        and not (tape.reads_of(call) | tape.writes_of(call)) & written
    }


def _is_of(
    call: Call, images: Mapping[Value, Value], indices: Mapping[Value, Value], tape: Tape
) -> bool:
    """Whether `call` pools such an image, or is the gradient of that."""
    if call.operator in (_MAX, _AVERAGE):
        return call.args[0] in images
    if call.operator is _MAX_BACKWARD:
        return call.args[7] in indices and _lies_last(call, tape)
    return call.operator is _AVERAGE_BACKWARD and call.args[1] in images and _lies_last(call, tape)


def _instead(call: Call, lie: Mapping[Value, Value], results: Sequence[Value]) -> list[Call]:
    """`call` of what lies as it did; its results are then copied to where they were."""
    args = tuple(lie.get(each, each) if isinstance(each, Value) else each for each in call.args)
    result = results[0] if isinstance(call.result, Value) else tuple(results)
    copies = [_copied(a, b, call) for a, b in zip(results, call.results, strict=True)]
    return [attrs.evolve(call, args=args, result=result), *copies]


def _lies_last(call: Call, tape: Tape) -> bool:
    gradient = tape.form(call.args[0])
    return gradient == _channels_last(gradient)


def _lying(value: Value, tape: Tape) -> Value:
    form = _channels_last(tape.form(value))
    assert form is not None
    return tape.new(form)


def _copied(value: Value, copy: Value, call: Call) -> Call:
    return Call(CLONE, (value,), {"memory_format": torch.contiguous_format}, copy, (), call.line)


def _channels_last(form: Form) -> Form | None:
    """`form` with its channels last; None of what has no rows and columns, or one channel."""
    if len(form.shape) != 4 or form.shape[1] == 1:
        return None
    _, channels, height, width = form.shape
    strides = (height * width * channels, 1, width * channels, channels)
    return attrs.evolve(form, strides=strides)


CLONE: Any = torch.ops.aten.clone.default
_MAX = torch.ops.aten.max_pool2d_with_indices.default
_MAX_BACKWARD = torch.ops.aten.max_pool2d_with_indices_backward.default
_AVERAGE = torch.ops.aten.avg_pool2d.default
_AVERAGE_BACKWARD = torch.ops.aten.avg_pool2d_backward.default
