"""Views of views, which are views of what is below them."""

from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.passes.buckets import VIEW
from shardcore.adapters.capture.passes.cleanup import without_dead_code
from shardcore.adapters.capture.passes.order import is_view
from shardcore.adapters.capture.tape import Call, Tape, Value, renamed, renamed_call


def with_direct_views(tape: Tape) -> Tape:
    """A row of views is one: a step of Keras and autograd has rows of five for each product.

    What they lie in is known, since a tape is of one run with tensors of one form.
    """
    below: dict[Value, Value] = {}
    names: dict[Value, Value] = {}
    calls = []
    for each in tape.calls:
        call = renamed_call(each, names)
        if call.operator in _VIEWS and is_view(each, tape):
            base = below.get(call.args[0], call.args[0])
            if tape.form(call.result) == tape.form(base):
                names[call.result] = base
                continue
            below[call.result] = base
            if base is not call.args[0] or call.operator is _RESHAPE:
                call = _view(base, call, tape)
        calls.append(call)
    found = tape.with_calls(calls)
    found.outputs = renamed(tape.outputs, names)
    return without_dead_code(found)


def _view(base: Value, call: Call, tape: Tape) -> Call:
    """The result of `call` as a view of `base`, which begins with the same element."""
    form = tape.form(call.result)
    if form.is_dense and tape.form(base).is_dense:
        return attrs.evolve(call, operator=VIEW, args=(base, list(form.shape)))
    args = base, list(form.shape), list(form.strides)
    return attrs.evolve(call, operator=torch.ops.aten.as_strided.default, args=args)


_RESHAPE = torch.ops.aten.reshape.default
# Those that begin with the first element of what they are of; `reshape` may be a copy.
_VIEWS: set[Any] = {
    VIEW,
    torch_compat.UNSAFE_VIEW,
    _RESHAPE,
    torch.ops.aten.expand.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.unsqueeze.default,
}
