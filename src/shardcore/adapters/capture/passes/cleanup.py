"""Drops calls that do nothing: views of views, and calls whose results are unused."""

from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.analyses import is_view, rewrite_calls
from shardcore.adapters.capture.passes.checks import check
from shardcore.adapters.capture.trace import Call, Trace, Value, values

VIEW = torch.ops.aten.view.default
_RESHAPE = torch.ops.aten.reshape.default
# Views that begin at the first element of their base; `reshape` may be a copy.
_VIEWS: set[Any] = {
    VIEW,
    torch_private.UNSAFE_VIEW,
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


def with_constant_loss_seed(trace: Trace) -> Trace:
    """Replaces the gradient that a backward pass begins with by a constant.

    `ones_like` of the loss reads its shape only: the loss may then be summed over the ranks later.
    """

    def plain(call: Call) -> Call:
        if call.operator is not torch.ops.aten.ones_like.default:
            return call
        form = trace.form(call.result)
        if form.shape:
            return call
        made = {"dtype": form.dtype, "device": form.device}
        return attrs.evolve(call, operator=torch.ops.aten.ones.default, args=([],), kwargs=made)

    return trace.with_calls(map(plain, trace.calls))


def with_direct_views(trace: Trace) -> Trace:
    """Replaces each view of a view by one view of the base.

    A step of Keras and autograd has chains of five views for each product. Shapes and strides are
    known, since a trace records one run.
    """
    below: dict[Value, Value] = {}

    def rewrite(call: Call, new_trace: Trace) -> Call | Value:
        if call.operator not in _VIEWS or not is_view(call, new_trace):
            return call
        base: Value = below.get(call.args[0], call.args[0])
        if new_trace.form(call.result) == new_trace.form(base):
            return base
        below[call.result] = base
        is_direct = base is call.args[0] and call.operator is not _RESHAPE
        return call if is_direct else _view(base, call, new_trace)

    return without_dead_code(rewrite_calls(trace, rewrite))


def _view(base: Value, call: Call, trace: Trace) -> Call:
    """Views `base`, which begins with the same element as the result of `call`."""
    form = trace.form(call.result)
    if form.is_dense and trace.form(base).is_dense:
        return attrs.evolve(call, operator=VIEW, args=(base, list(form.shape)))
    args = base, list(form.shape), list(form.strides)
    return attrs.evolve(call, operator=torch.ops.aten.as_strided.default, args=args)


def without_dead_code(trace: Trace) -> Trace:
    """Drops calls on which no output, tensor outside, rank or draw depends."""
    read = set(values(trace.outputs))
    live = trace.memories(read) | trace.given()
    live_calls = []
    for call in reversed(trace.calls):
        # A call that writes is live if its memory is; any other, if a result is read.
        is_read = trace.writes_of(call) & live if call.writes else read & set(call.results)
        if is_read or _has_effect(call.operator):
            live_calls.append(call)
            live |= trace.reads_of(call) | trace.writes_of(call)
            read |= set(call.operands)
    return trace.with_calls(reversed(live_calls))


def _has_effect(operator: Any) -> bool:
    draws, sends = torch_private.draws(operator), torch_private.is_of_collectives(operator)
    return draws or sends or operator is check
