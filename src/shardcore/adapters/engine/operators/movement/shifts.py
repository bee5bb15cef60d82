"""Slices and pads along a sharded dim, by an exchange of elements between ranks."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters.engine.moves.steps import run_exchange
from shardcore.adapters.engine.plans.task import Operand, Operator
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.engine.writes import note_view
from shardcore.adapters.job.threads import check_thread
from shardcore.domain.redistribution.shift import Shift
from shardcore.ports.measurement.trace_context import Move, redistribution_scope

aten = torch.ops.aten


@attrs.frozen(eq=False)
class ShiftHandlers:
    """The handlers of operators that take a range of a sharded dim.

    Args:
        shift: The range.
        value: The value of elements that are added before and after the dim.
    """

    shift: Shift
    value: float = 0

    @classmethod
    def of(
        cls, tensor: Operand, dim: int, start: int, size: int, value: float = 0
    ) -> "ShiftHandlers | None":
        """Returns the handlers for `size` elements of `dim` from `start`; None if a rule suffices.

        It does for a weight, a partial tensor, and one that has a redistributed copy.
        """
        layout = tensor.form.layout
        if tensor.form.weight or tensor.other is not None or layout.partial:
            return None
        shift = Shift.of(layout, dim, tensor.shape[dim], start, size)
        return None if shift is None else cls(shift, value)

    def run(self, _operator: Operator, tensor: ShardedTensor, *_rest: object) -> Any:
        """Runs an operator whose result is the range of `tensor`, such as `slice_backward`."""
        engine, shift, dim = tensor.engine, self.shift, self.shift.exchange.dim
        shape = (*tensor.shape[:dim], shift.size, *tensor.shape[dim + 1 :])
        if not shift.exchange.is_local:
            check_thread()
        move = Move(tensor.part, tuple(tensor.shape), tensor.form.layout, shift.layout)
        with redistribution_scope(move):
            part = run_exchange(tensor.part, shift.exchange, engine)
        coordinate = engine.world.mesh.position_along([shift.exchange.axis], engine.world.position)
        pads = shift.pads[coordinate]
        if any(pads):
            others = [0, 0] * (part.ndim - 1 - dim)
            part = aten.constant_pad_nd(part, [*others, *pads], self.value)
        return engine.sharded(part, shift.layout, shape)

    def slice(self, operator: Operator, tensor: ShardedTensor, *rest: object) -> Any:
        """Runs `slice(tensor, ...)`."""
        result = self.run(operator, tensor)
        note_view(result, tensor, lambda full: operator(full, *rest), is_copy=True)
        return result

    def pad(
        self, operator: Operator, tensor: ShardedTensor, pads: Sequence[int], *_: object
    ) -> Any:
        """Runs `constant_pad_nd(tensor, pads, value)`: the sharded dim first."""
        at = 2 * (tensor.ndim - 1 - self.shift.exchange.dim)
        others = [*pads[:at], 0, 0, *pads[at + 2 :]]
        result = self.run(operator, tensor)
        return operator(result, others, self.value) if any(others) else result


def of_pads(tensor: Operand, pads: Sequence[int], value: float) -> ShiftHandlers | None:
    """Returns the handlers for pads of a sharded dim; None for pads of none or of several."""
    given = [tensor.ndim - 1 - at // 2 for at in range(0, len(pads), 2) if any(pads[at : at + 2])]
    sharded = [dim for dim in given if tensor.is_sharded(dim)]
    if len(sharded) != 1:
        return None
    (dim,) = sharded
    at = 2 * (tensor.ndim - 1 - dim)
    size = tensor.shape[dim] + pads[at] + pads[at + 1]
    return ShiftHandlers.of(tensor, dim, -pads[at], size, value)
