"""Counts of a trace: the collectives that it starts, the bytes that it sends, its operations."""

from collections.abc import Iterator

import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.trace import Trace, Value, values
from shardcore.adapters.flops import count_flops
from shardcore.ports.capture import StartedCollective


def started_collectives(trace: Trace, *, in_graph: bool = False) -> Iterator[StartedCollective]:
    """Yields the collectives of `trace`, in order; all ranks have them in a graph, or none has."""
    where = " in a CUDA graph" if in_graph else ""
    for call in trace.calls:
        if call.collective:
            *operands, group = call.args  # the group's name is another one on other ranks
            plain = [operand for operand in operands if isinstance(operand, str | int)]
            # An all-to-all has a list of sizes: ranks may send more or less.
            may_differ = any(
                isinstance(operand, list) and not values(operand) for operand in operands
            )
            tensors = list(call.operands)
            elements = 0 if may_differ else sum(trace.form(value).elements for value in tensors)
            # Whether it writes where its operand was may differ between ranks.
            name = call.collective
            kind = f"{name} of {len(tensors)}, {plain}{where}"
            yield StartedCollective(kind, str(group), elements)


def sent_bytes(trace: Trace) -> Iterator[int]:
    """Yields the bytes that this rank gives to each collective of `trace`."""
    for call in trace.calls:
        if call.collective:
            operands = torch_private.collective_operands(call.operator, call.args)
            yield sum(trace.form(value).bytes for value in values(operands))


def flops_of(trace: Trace) -> Iterator[int]:
    """Yields the floating-point operations of each call of `trace`, by the shapes of its forms."""

    def without_values(leaf: object) -> object:
        form = trace.forms[leaf.number] if isinstance(leaf, Value) else None
        return leaf if form is None else torch.empty(form.shape, dtype=form.dtype, device="meta")

    for call in trace.calls:
        operands = torch_private.tree_map(without_values, (call.args, call.kwargs))
        yield count_flops(
            call.operator, operands, torch_private.tree_map(without_values, call.result)
        )
