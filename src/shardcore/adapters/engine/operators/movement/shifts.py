"""Slices and pads along a sharded dim, by an exchange of elements between ranks."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters.engine.moves.steps import exchanged
from shardcore.adapters.engine.plans.task import Operand, Operator
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.engine.writes import note_view
from shardcore.adapters.job.threads import check_thread
from shardcore.domain.layout import Layout
from shardcore.domain.redistribution.exchange import Exchange
from shardcore.domain.redistribution.segments import ranges_of
from shardcore.ports.measurement.trace_context import Move, redistribution_scope

aten = torch.ops.aten


@attrs.frozen(eq=False)
class Shift:
    """Takes a range of a sharded dim, which may begin before the dim or end behind it."""

    exchange: Exchange  # the exchange of the existing elements
    size: int  # the number of elements in the range
    # For each place along the axis, the numbers of elements to add before and after.
    pads: tuple[tuple[int, int], ...]
    layout: Layout
    value: Any = 0  # the value of the added elements

    @classmethod
    def of(
        cls, tensor: Operand, dim: int, start: int, size: int, value: float = 0
    ) -> "Shift | None":
        """Returns the shift of `tensor` to the `size` elements of `dim` from `start`.

        None if a rule suffices, or a rank would get no element.
        """
        layout = tensor.form.layout
        axes = layout.dim_axes(dim)
        is_known = tensor.form.weight or tensor.other is not None
        if is_known or len(axes) != 1 or layout.segments[dim] > 1 or layout.partial:
            return None
        blocks = tuple(1 if each == dim else block for each, block in enumerate(layout.blocks))
        found = Layout(layout.mesh, layout.spec, (), blocks)
        chunks = [(each.start, each.stop) for (each,) in ranges_of(found, dim, size)]
        if not tensor.is_sharded(dim) or min(end - begin for begin, end in chunks) < 1:
            return None
        length = tensor.shape[dim]
        wanted = [range(*(min(max(start + each, 0), length) for each in chunk)) for chunk in chunks]
        before = [min(max(-start, begin), end) - begin for begin, end in chunks]
        pads = tuple(
            (missing, end - begin - missing - len(each))
            for missing, (begin, end), each in zip(before, chunks, wanted, strict=True)
        )
        held = ranges_of(layout, dim, length)
        exchange = Exchange(axes[0], dim, held, tuple((each,) for each in wanted))
        return cls(exchange, size, pads, found, value)

    def run(self, _operator: Operator, tensor: ShardedTensor, *_rest: object) -> Any:
        """Runs an operator whose result is the range of `tensor`, such as `slice_backward`."""
        engine, dim = tensor.engine, self.exchange.dim
        shape = (*tensor.shape[:dim], self.size, *tensor.shape[dim + 1 :])
        if not self.exchange.is_local:
            check_thread()
        move = Move(tensor.part, tuple(tensor.shape), tensor.form.layout, self.layout)
        with redistribution_scope(move):
            part = exchanged(tensor.part, self.exchange, engine)
        mesh = engine.world.mesh
        place = mesh.coordinate(engine.world.position)[mesh.axis_index(self.exchange.axis)]
        if any(self.pads[place]):
            others = [0, 0] * (part.ndim - 1 - dim)
            part = aten.constant_pad_nd(part, [*others, *self.pads[place]], self.value)
        return engine.sharded(part, self.layout, shape)

    def slice(self, operator: Operator, tensor: ShardedTensor, *rest: object) -> Any:
        """Runs `slice(tensor, ...)`."""
        result = self.run(operator, tensor)
        note_view(result, tensor, lambda full: operator(full, *rest), is_copy=True)
        return result

    def pad(
        self, operator: Operator, tensor: ShardedTensor, pads: Sequence[int], *_: object
    ) -> Any:
        """Runs `constant_pad_nd(tensor, pads, value)`: the sharded dim first."""
        at = 2 * (tensor.ndim - 1 - self.exchange.dim)
        others = [*pads[:at], 0, 0, *pads[at + 2 :]]
        result = self.run(operator, tensor)
        return operator(result, others, self.value) if any(others) else result


def of_pads(tensor: Operand, pads: Sequence[int], value: float) -> Shift | None:
    """Returns the shift that pads a sharded dim, None if no sharded dim or several are padded."""
    given = [tensor.ndim - 1 - at // 2 for at in range(0, len(pads), 2) if any(pads[at : at + 2])]
    sharded = [dim for dim in given if tensor.is_sharded(dim)]
    if len(sharded) != 1:
        return None
    (dim,) = sharded
    at = 2 * (tensor.ndim - 1 - dim)
    size = tensor.shape[dim] + pads[at] + pads[at + 1]
    return Shift.of(tensor, dim, -pads[at], size, value)
