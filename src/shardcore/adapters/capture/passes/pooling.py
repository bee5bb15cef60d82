"""Max pooling of images whose channels lie last, as they do in Keras: torch has it, and faster."""

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
        if call.operator is _POOL and call.args[0] in images:
            found.calls += _pooled(call, images[call.args[0]], indices, found)
        elif call.operator is _BACKWARD and call.args[7] in indices and _lies_last(call, tape):
            args = list(call.args)
            args[1], args[7] = images[call.args[1]], indices[call.args[7]]
            result = _lying(call.result, found)
            found.calls += [
                attrs.evolve(call, args=tuple(args), result=result),
                _copied(result, call.result, call),
            ]
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


def _pooled(call: Call, image: Value, indices: dict[Value, Value], tape: Tape) -> list[Call]:
    """`call` of the image itself; its results are then copied to where they were."""
    lying = [_lying(each, tape) for each in call.result]
    indices[call.result[1]] = lying[1]
    copies = [_copied(a, b, call) for a, b in zip(lying, call.result, strict=True)]
    return [attrs.evolve(call, args=(image, *call.args[1:]), result=lying), *copies]


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
_POOL = torch.ops.aten.max_pool2d_with_indices.default
_BACKWARD = torch.ops.aten.max_pool2d_with_indices_backward.default
