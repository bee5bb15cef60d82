"""Writes a region of a step as one call after another for each slice of its rows."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters.capture.analyses import rename_call, rename_values
from shardcore.adapters.capture.passes.cleanup import without_dead_code
from shardcore.adapters.capture.trace import Call, Form, Trace, Value, numbered
from shardcore.domain.layouts.placements import Partial, Placement, Shard, segments_of

_ADD = torch.ops.aten.add_.Tensor
_ADDMM = torch.ops.aten.addmm_.default
_CAT = torch.ops.aten.cat.default
_CLONE = torch.ops.aten.clone.default
_MM = torch.ops.aten.mm.default
_SLICE = torch.ops.aten.slice.Tensor
_CAST = torch.ops.aten.to.dtype
_VIEW = torch.ops.aten.view.default
_HALF = {torch.float16, torch.bfloat16}


Shape = tuple[int, ...]


@attrs.frozen(eq=False)
class Region:
    """Calls of a step that run one after another.

    Args:
        calls: The calls.
        inputs: The values that they read and do not make.
        outputs: The values that they make for others.
        before: The calls that run before them.
        after: The calls that run after them.
        largest: The form of their largest value.
    """

    calls: Sequence[Call]
    inputs: Sequence[Value]
    outputs: Sequence[Value]
    before: Sequence[Call]
    after: Sequence[Call]
    largest: Form


@attrs.frozen(eq=False)
class SlicedCalls:
    """The calls of a region for one slice, the same for each slice.

    Args:
        trace: The calls; its inputs are slices of those of the region, or all of them.
        inputs: How each input is sliced.
        outputs: How each output results from those of the slices.
    """

    trace: Trace
    inputs: Sequence[Placement]
    outputs: Sequence[Placement]


@attrs.define(eq=False)
class Unrolled:
    """Writes the calls of all slices, one slice after another.

    Args:
        trace: The step.
        region: The region.
        calls: Its calls for a slice.
        slices: The number of slices.
    """

    trace: Trace
    region: Region
    calls: SlicedCalls
    slices: int
    _new: Trace = attrs.field(init=False)
    # By output of the region, its parts in the slices; or the one that all slices add to, or have.
    _parts: dict[Value, list[Value]] = attrs.field(factory=dict, init=False)

    def step(self) -> Trace:
        """Builds the step."""
        self._new = self.trace.with_calls(self.region.before)
        for number in range(self.slices):
            begin = len(self._new.calls)
            for value, placement, part in zip(
                self.region.outputs, self.calls.outputs, self._slice(number), strict=True
            ):
                parts = self._parts.setdefault(value, [])
                if isinstance(placement, Shard):
                    parts.append(part)
                elif not parts:
                    parts.append(self._sum(part) if isinstance(placement, Partial) else part)
                elif isinstance(placement, Partial):
                    self._add(parts[0], part, begin)
        names = dict(map(self._joined, self.region.outputs, self.calls.outputs))
        self._new.calls += [rename_call(call, names) for call in self.region.after]
        self._new.outputs = rename_values(self.trace.outputs, names)
        self._new.share(names)
        return without_dead_code(self._new)

    def _slice(self, number: int) -> list[Value]:
        """Adds the calls of a slice; returns its parts of the outputs."""
        calls = self.calls.trace
        names = {
            local: self._input(value, placement, number)
            for local, value, placement in zip(
                calls.inputs, self.region.inputs, self.calls.inputs, strict=True
            )
        }
        for call in calls.calls:
            for value in call.results:
                if value not in names:
                    owner = names.get(numbered(calls.memory[value.number]))
                    memory = None if owner is None else self._memory(owner)
                    names[value] = self._new.new(calls.form(value), memory)
            self._new.calls.append(rename_call(call, names))
        return [names[value] for value in calls.outputs]

    def _input(self, value: Value, placement: Placement, number: int) -> Value:
        """Adds the slice of an input, contiguous as the calls of the slices need it."""
        if not isinstance(placement, Shard):
            return value
        form, dim, count = self.trace.form(value), placement.dim, _segments(placement)
        if count > 1:  # the rows of each segment are sliced
            shape, strides = _with_segments(form.shape, dim, count), list(form.strides)
            strides.insert(dim, form.strides[dim] * shape[dim + 1])
            form, dim = attrs.evolve(form, shape=shape, strides=tuple(strides)), dim + 1
            value = self._append(_VIEW, (value, list(shape)), form=form, memory=self._memory(value))
        size = form.shape[dim] // self.slices
        form = attrs.evolve(form, shape=(*form.shape[:dim], size, *form.shape[dim + 1 :]))
        bounds = number * size, (number + 1) * size
        part = self._append(_SLICE, (value, dim, *bounds), form=form, memory=self._memory(value))
        dense = Form(form.shape, form.dtype, form.device)
        strides_of_dims = zip(form.shape, form.strides, dense.strides, strict=True)
        if any(own != needed for length, own, needed in strides_of_dims if length > 1):
            contiguous = {"memory_format": torch.contiguous_format}
            part = self._append(_CLONE, (part,), contiguous, form=dense)
        if count == 1:
            return part
        shape = (*form.shape[: dim - 1], count * size, *form.shape[dim + 1 :])
        return self._viewed(part, shape)

    def _viewed(self, value: Value, shape: Shape) -> Value:
        """Adds a view of a contiguous tensor."""
        form = self._new.form(value)
        dense = Form(shape, form.dtype, form.device)
        return self._append(_VIEW, (value, list(shape)), form=dense, memory=self._memory(value))

    def _memory(self, value: Value) -> int:
        return self._new.memory[value.number]

    def _sum(self, part: Value) -> Value:
        """Adds a tensor that begins as the part of the first slice: in float32, if that is half."""
        form = self._new.form(part)
        if form.dtype in _HALF:
            form = attrs.evolve(form, dtype=torch.float32)
            return self._append(_CAST, (part, torch.float32), form=form)
        is_view = self._memory(part) != part.number
        return self._append(_CLONE, (part,), form=form) if is_view else part

    def _add(self, total: Value, part: Value, begin: int) -> None:
        """Adds the part of a slice, whose calls begin at index `begin`, to a sum.

        A product that nothing else reads is added as it is computed: a gradient of a large kernel
        is not held twice.
        """
        memory, form = self._memory(part), self._new.form(part)
        users = [
            index
            for index, call in enumerate(self._new.calls[begin:], begin)
            if memory in self._new.memories((*call.operands, *call.results))
        ]
        maker = self._new.calls[users[0]] if len(users) == 1 else None
        if maker is None or maker.operator is not _MM or form != self._new.form(total):
            self._append(_ADD, (total, part), result=total, writes=(total,))
            return
        self._new.calls[users[0]] = attrs.evolve(
            maker, operator=_ADDMM, args=(total, *maker.args), result=total, writes=(total,)
        )

    def _joined(self, value: Value, placement: Placement) -> tuple[Value, Value]:
        """Adds the output of the region that results from its parts."""
        form, parts = self.trace.form(value), self._parts[value]
        if isinstance(placement, Shard):
            dim, count = placement.dim, _segments(placement)
            if count == 1:
                return value, self._append(_CAT, (parts, dim), form=form)
            segmented = _with_segments(form.shape, dim, count)
            shape = (
                *segmented[: dim + 1],
                segmented[dim + 1] // self.slices,
                *segmented[dim + 2 :],
            )
            parts = [self._viewed(part, shape) for part in parts]
            dense = Form(segmented, form.dtype, form.device)
            return value, self._viewed(self._append(_CAT, (parts, dim + 1), form=dense), form.shape)
        if self._new.form(parts[0]).dtype != form.dtype:
            return value, self._append(_CAST, (parts[0], form.dtype), form=form)
        return value, parts[0]

    def _append(
        self,
        operator: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        form: Form | None = None,
        memory: int | None = None,
        result: Value | None = None,
        writes: tuple[Value, ...] = (),
    ) -> Value:
        """Adds a call; its result is a new value of `form`, unless it is given."""
        if result is None:
            assert form is not None
            result = self._new.new(form, memory)
        last = self._new.calls[-1]
        self._new.calls.append(
            Call(operator, args, kwargs or {}, result, writes, last.line, last.backward)
        )
        return result


def _segments(placement: Shard) -> int:
    """Counts the segments of a dim, each of which is sliced: the examples of a batch."""
    return segments_of(placement.block).count


def _with_segments(shape: Shape, dim: int, count: int) -> Shape:
    """Makes two dims of one: its segments, and the elements of a segment."""
    return (*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])
