"""Gradients of padding, for steps that Inductor compiles."""

from typing import Any

import attrs
import torch

from shardcore.adapters.capture.tape import Call, Form, Tape


def with_plain_paddings(tape: Tape) -> Tape:
    """The gradient of padding by the edge lies as Inductor takes it to lie.

    torch 2.13 lays it as the padded tensor lies, whose values it does not read; Inductor, which
    may lay that otherwise than the step did, says: one element after the other. So it is given
    another tensor of the same shape.
    """
    found = tape.with_calls([])
    for call in tape.calls:
        if call.operator in _BACKWARD:
            form = found.form(call.args[1])
            plain = found.new(Form(form.shape, form.dtype, form.device))
            sizes = list(form.shape)
            found.calls += [
                Call(_NEW, (call.args[1], sizes), {}, plain, line=call.line),
                attrs.evolve(call, args=(call.args[0], plain, *call.args[2:])),
            ]
        else:
            found.calls.append(call)
    return found


_NEW: Any = torch.ops.aten.new_empty.default
_BACKWARD = {
    torch.ops.aten.replication_pad1d_backward.default,
    torch.ops.aten.replication_pad2d_backward.default,
    torch.ops.aten.replication_pad3d_backward.default,
}
