"""Pieces of a dim: slices, splits, concatenation, repetition."""

from collections.abc import Sequence
from math import gcd
from typing import Any

import attrs
import torch

from shardcore.adapters.engine.operators.views import one_result, several_results
from shardcore.adapters.engine.redistribution_steps import run_exchange
from shardcore.adapters.engine.task import Handler, Operand, Operator, Planner, Task, by_operator
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.engine.writes import note_view
from shardcore.adapters.ranks.job.threads import check_thread
from shardcore.domain.engine.choice import Sharding
from shardcore.domain.engine.rules import basic, movement
from shardcore.domain.engine.rules.rule import OperatorRule
from shardcore.domain.engine.segments import Shift
from shardcore.domain.layouts.derived_layouts import reduced_by_ranks, with_dims
from shardcore.ports.measurement import Move, redistribution_scope


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
        """Makes the handlers for `size` elements of `dim` from `start`; None if a rule suffices.

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
    """Makes the handlers for pads of a sharded dim; None for pads of none or of several."""
    given = [tensor.ndim - 1 - at // 2 for at in range(0, len(pads), 2) if any(pads[at : at + 2])]
    sharded = [dim for dim in given if tensor.is_sharded(dim)]
    if len(sharded) != 1:
        return None
    (dim,) = sharded
    at = 2 * (tensor.ndim - 1 - dim)
    size = tensor.shape[dim] + pads[at] + pads[at + 1]
    return ShiftHandlers.of(tensor, dim, -pads[at], size, value)


aten = torch.ops.aten


def _slice(operator: Operator, tensor: Operand, dim: int = 0, *bounds: Any) -> Task | Handler:
    """Plans a slice; `bounds` are start, end and step, as far as given."""
    dim %= tensor.ndim
    size = tensor.shape[dim]
    taken = _range_of(size, *bounds)
    if not taken:
        return _empty(tensor, dim)
    if taken.step > 1:
        rule = basic.along(tensor.ndim, frozenset({dim}))
        return one_result(rule, tensor, lambda part: operator(part, dim, *bounds))
    segment = gcd(taken.start, taken.stop, size)
    shift = _shift(tensor, dim, segment, taken.start, len(taken))
    if shift is not None:
        return shift.slice

    def call(part: torch.Tensor) -> Any:
        start, end = (bound * part.shape[dim] // size for bound in (taken.start, taken.stop))
        return operator(part, dim, start, end)

    counts = (size // segment,), (len(taken) // segment,)
    return one_result(movement.segmented(tensor.ndim, dim, *counts), tensor, call)


def _range_of(size: int, start: int | None = None, end: int | None = None, step: int = 1) -> range:
    """Lists the elements that a slice takes. Python's `slice(start)` would end there."""
    return range(size)[start:end:step]


def _empty(tensor: Operand, dim: int) -> Task:
    """Plans a slice without elements along `dim`, for which no collective is needed."""
    layout = tensor.form.layout
    target = layout.without(*layout.dim_axes(dim)).reduced
    return Task(
        basic.along(tensor.ndim, frozenset({dim})),
        [tensor],
        lambda parts: (parts[0].narrow(dim, 0, 0),),
        layouts=Sharding.of([layout], [target], tensor.shape),
    )


def _shift(tensor: Operand, dim: int, segment: int, start: int, size: int) -> ShiftHandlers | None:
    """Makes the handlers for `size` elements from `start`, None if each segment can be sharded.

    A tensor is redistributed into segments once, for all slices of it.
    """
    handlers = ShiftHandlers.of(tensor, dim, start, size)
    return handlers if handlers is not None and segment < len(handlers.shift.pads) else None


def _slice_backward(
    operator: Operator, gradient: Operand, sizes: Sequence[int], dim: int, *bounds: Any
) -> Task | Handler:
    dim %= len(sizes)
    size = sizes[dim]
    taken = _range_of(size, *bounds)
    if taken.step > 1 or not taken:
        rule = basic.along(gradient.ndim, frozenset({dim}))
    else:
        segment = gcd(taken.start, taken.stop, size)
        shift = _shift(gradient, dim, segment, -taken.start, size)
        if shift is not None:
            return shift.run
        counts = (len(taken) // segment,), (size // segment,)
        rule = movement.segmented(gradient.ndim, dim, *counts)

    def call(part: torch.Tensor) -> Any:
        local = list(part.shape)
        if taken.step > 1 or not taken:
            local[dim] = size
            return operator(part, local, dim, *bounds)
        local[dim], start, end = (
            bound * part.shape[dim] // len(taken) for bound in (size, taken.start, taken.stop)
        )
        return operator(part, local, dim, start, end, 1)

    return one_result(rule, gradient, call)


def _select(operator: Operator, tensor: Operand, dim: int, index: int) -> Task | Handler:
    layout, dim = tensor.form.layout, dim % tensor.ndim
    in_one_piece = layout.segments[dim] == 1 and tensor.dtype is not torch.bool
    if tensor.is_sharded(dim) and in_one_piece:
        return _select_on_owner
    return one_result(
        _rule_without_dim(tensor, dim), tensor, lambda part: operator(part, dim, index)
    )


def _rule_without_dim(tensor: Operand, dim: int, results: int = 1) -> OperatorRule:
    dims = [other for other in range(tensor.ndim) if other != dim]
    return movement.permute(tensor.ndim, dims, results)


def _select_on_owner(operator: Operator, tensor: ShardedTensor, dim: int, index: int) -> Any:
    """Makes a partial sum: the rank that owns the index has its slice, the others have zeros."""
    engine, layout, shape = tensor.engine, tensor.form.layout, list(tensor.shape)
    dim %= tensor.ndim
    of_dim = with_dims(layout.reduced, [dim])
    own = range(shape[dim])[of_dim.slices((shape[dim],), engine.world.position)[0]]
    place = range(shape.pop(dim))[index]
    local = [*tensor.part.shape[:dim], *tensor.part.shape[dim + 1 :]]
    part = (
        tensor.part.select(dim, own.index(place)).clone(memory_format=torch.contiguous_format)
        if place in own
        else tensor.part.new_zeros(local)
    )
    others = [other for other in range(tensor.ndim) if other != dim]
    pending = with_dims(reduced_by_ranks(layout, dim, "sum"), others)
    result = engine.sharded(part, pending, tuple(shape))
    note_view(result, tensor, lambda full: operator(full, dim, index), is_copy=True)
    return result


def _select_backward(
    operator: Operator, gradient: Operand, sizes: Sequence[int], dim: int, index: int
) -> Task:
    dim %= len(sizes)
    dims = range(gradient.ndim)
    rule = movement.permute(gradient.ndim, [*dims[:dim], None, *dims[dim:]])

    def call(part: torch.Tensor) -> Any:
        local = list(part.shape)
        local.insert(dim, sizes[dim])
        return operator(part, local, dim, index)

    return one_result(rule, gradient, call)


def _concatenate(operator: Operator, tensors: list[Operand], dim: int = 0) -> Task:
    """Plans `cat` and `stack`; if all operands are partial sums, so is the result."""
    new = operator is aten.stack.default
    if not new:  # torch joins empty tensors of one dim to any tensor
        tensors = [tensor for tensor in tensors if tensor.shape != (0,)] or list(tensors)
    ndim = tensors[0].ndim
    dim %= ndim + new
    if new:
        rule = movement.permute(ndim, [*range(dim), None, *range(dim, ndim)], operands=len(tensors))
    else:
        rule = movement.concatenation(ndim, dim, [tensor.shape[dim] for tensor in tensors])
    are_pending = all(tensor.form.layout.partial for tensor in tensors)
    adds = range(len(tensors)) if are_pending else ()
    return Task(rule, tensors, lambda parts: (operator(list(parts), dim),), adds=adds)


def _cut(_operator: Operator, tensor: Operand, sizes: int | list[int], dim: int = 0) -> Task:
    """Plans `split(tensor, sizes)`, with a list of sizes or one size for all."""
    dim %= tensor.ndim
    length = tensor.shape[dim]
    if not isinstance(sizes, list | tuple):
        sizes = [min(sizes, length - at) for at in range(0, length, sizes)] if length else [0]

    def call(part: torch.Tensor) -> Sequence[torch.Tensor]:
        local = part.shape[dim]
        return torch.split(part, [size * local // max(length, 1) for size in sizes], dim)

    return several_results(movement.cut(tensor.ndim, dim, sizes), tensor, call)


def _repeat(_operator: Operator, tensor: Operand, repeats: Sequence[int]) -> Task | None:
    if 0 in repeats:
        return None
    return Task(movement.repeat(tensor.ndim, repeats), [tensor])


def _unbind(operator: Operator, tensor: Operand, dim: int = 0) -> Task:
    dim %= tensor.ndim
    rule = _rule_without_dim(tensor, dim, tensor.shape[dim])
    return several_results(rule, tensor, lambda part: operator(part, dim))


PLANNERS: dict[Any, Planner] = by_operator(
    {
        "slice.Tensor": _slice,
        "slice_backward": _slice_backward,
        "select.int": _select,
        "select_backward": _select_backward,
        "split.Tensor split_with_sizes": _cut,
        "unbind.int": _unbind,
        "repeat": _repeat,
        "cat stack": _concatenate,
    }
)
