"""Joins all-reduces into buckets, in scratch memory that all runs use (ADR 38)."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.analyses import FAR, makers_of, needs_of
from shardcore.adapters.capture.passes.checks import check
from shardcore.adapters.capture.trace import Call, Form, Trace, Value, values
from shardcore.domain.cost.gradients import BUCKET_BYTES
from shardcore.ports.capture import RecordedSum

# Fewer bytes go into one bucket: they take less time than the latency of a collective.
SMALL_BYTES = 1024 * 1024
# torch 2.13: the alignment of tensors on a CPU (c10::gAlignment); on a GPU it is a multiple of it.
ROUND_BYTES = 64
# The elements of a tensor that is small: a loss, a count, the counts of some classes.
SMALL = 64

_FLATTEN = torch.ops.aten.flatten_dense_tensors.default
_SPLIT = torch.ops.aten.split_with_sizes.default
_VIEW = torch.ops.aten.view.default
_VIEWS = (_VIEW, torch_private.UNSAFE_VIEW)
# Operators with an `out` variant that gives the same values.
_INTO = {
    torch.ops.aten.mm.default: torch.ops.aten.mm.out,
    torch.ops.aten.bmm.default: torch.ops.aten.bmm.out,
}


class Memories:
    """The memory of buckets, into which a program writes before it reads them.

    Programs run in turns: they share it. When the last program that has a tensor is gone, so is the
    tensor. New memory of many megabytes comes from the operating system page by page, in each run,
    which may take as long as the all-reduce.
    """

    def __init__(self) -> None:
        self._made: WeakValueDictionary[tuple[Form, int], torch.Tensor] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._made)

    def buffer(self, form: Form, number: int) -> torch.Tensor:
        """Finds or makes a tensor of this form; a program takes several by their numbers."""
        tensor = self._made.get((form, number))
        if tensor is None:
            tensor = torch.empty(form.shape, dtype=form.dtype, device=form.device)
            self._made[form, number] = tensor
        return tensor


def in_buckets(
    trace: Trace,
    memories: Memories | None = None,
    sums: Sequence[RecordedSum] | None = None,
    most: int = BUCKET_BYTES,
    small: int = SMALL_BYTES,
) -> Trace:
    """Joins all-reduces into buckets.

    A bucket has one operation, dtype and group. It starts where its last all-reduce was, and
    what depends on the others moves behind it: small tensors, such as losses, however far; others
    over few calls. For `n` bytes there are at most `ceil(n / most) + 1` buckets of about one size:
    all but the last overlap with the backward pass. `small` bytes or fewer go into one bucket.

    Args:
        trace: A step.
        memories: Has the memory of buckets, in which gradients are then computed and reduced. A
            program copies its outputs before the next run writes there. None makes new memory in
            each run.
        sums: The all-reduces, the same on all ranks; by default those of this rank.
        most: The most bytes of a bucket.
        small: The bytes that need no second bucket.
    """
    indices = (index for index, call in enumerate(trace.calls) if call.is_all_reduce)
    sums_at = dict(zip(indices, sums or trace.all_reduces, strict=True))
    needs = needs_of(trace)
    buckets = list(_buckets(trace, needs, sums_at, _limits(trace, sums_at, most, small)))
    new_trace = attrs.evolve(trace.with_calls(trace.calls), buffers=dict(trace.buffers))
    replacements: dict[int, list[Call]] = {}
    buffers = None if memories is None else _ScratchBuckets(new_trace, memories, replacements)
    for bucket in buckets:
        # Tensors of odd sizes come last, so that the others are aligned in memory.
        calls = sorted(
            (trace.calls[index] for index in bucket),
            key=lambda call: trace.form(call.args[0]).bytes % ROUND_BYTES != 0,
        )
        if len(calls) > 1:
            forms = [trace.form(call.args[0]) for call in calls]
            form = Form(
                (sum(part_form.elements for part_form in forms),), forms[0].dtype, forms[0].device
            )
            joined = (
                _merge_in_new_memory(calls, form, new_trace)
                if buffers is None
                else buffers.merge(calls, form)
            )
            replacements |= {index: [] for index in bucket} | {bucket[-1]: joined}
    new_trace.share({} if buffers is None else buffers.owners)
    order = _order(needs, buckets)
    chunks = (replacements.get(index, [trace.calls[index]]) for index in order)
    return new_trace.with_calls(chain.from_iterable(chunks))


def _bucket_key(call: Call, trace: Trace) -> Any:
    form = trace.form(call.args[0])
    return (*call.args[1:], form.dtype, form.device)


def _limits(trace: Trace, sums_at: dict[int, RecordedSum], most: int, small: int) -> dict[Any, int]:
    """Computes, by kind, the bytes after which a bucket starts."""
    totals: Counter[Any] = Counter()
    for index, recorded_sum in sums_at.items():
        totals[_bucket_key(trace.calls[index], trace)] += recorded_sum.bytes
    return {
        kind: most if total <= small else math.ceil(total / (math.ceil(total / most) + 1))
        for kind, total in totals.items()
    }


@attrs.define
class _OpenBucket:
    """A bucket that may get more all-reduces.

    Args:
        indices: The indices of its all-reduces.
        bytes: Their bytes.
        behind: Their indices, and those of all calls that depend on them.
        large: The calls before the last all-reduce that ran before the first large call among
            these, or is it.
    """

    indices: list[int] = attrs.field(factory=list)
    bytes: int = 0
    behind: set[int] = attrs.field(factory=set)
    large: float = math.inf


def _buckets(
    trace: Trace, needs: list[set[int]], sums_at: dict[int, RecordedSum], limits: dict[Any, int]
) -> Iterator[list[int]]:
    """Yields the indices of the all-reduces of each bucket.

    A bucket gets no more when an all-reduce depends on it: so no two wait for each other. How far
    a call is, is counted from all-reduce to all-reduce: so all ranks decide the same.
    """
    buckets: dict[Any, _OpenBucket] = {}
    now = 0
    for index, call in enumerate(trace.calls):
        now = sums_at[index].calls if index in sums_at else now
        for kind, bucket in list(buckets.items()):
            is_behind = not needs[index].isdisjoint(bucket.behind)
            if index in sums_at and (is_behind or now - bucket.large > FAR):
                yield buckets.pop(kind).indices
            elif is_behind:
                bucket.behind.add(index)
                if not _is_small(call, trace):
                    bucket.large = min(bucket.large, now)
        if index in sums_at:
            kind = _bucket_key(call, trace)
            bucket = buckets.setdefault(kind, _OpenBucket())
            bucket.indices.append(index)
            bucket.bytes += sums_at[index].bytes
            bucket.behind.add(index)
            if bucket.bytes >= limits[kind]:
                yield buckets.pop(kind).indices
    yield from (left.indices for left in buckets.values())


def _is_small(call: Call, trace: Trace) -> bool:
    """Finds calls that may come much later: a step that is left at a check did not go far."""
    forms = [trace.forms[value.number] for value in (*call.operands, *call.results)]
    return call.operator is not check and all(form and form.elements <= SMALL for form in forms)


def _order(needs: list[set[int]], buckets: list[list[int]]) -> list[int]:
    """Sorts all calls: what depends on a bucket runs after its last all-reduce."""
    last_of = {index: bucket[-1] for bucket in buckets for index in bucket}
    behind: list[int] = []  # by index of a call, the index at or behind which it runs
    for index, before in enumerate(needs):
        behind.append(max([index, *(last_of.get(earlier, behind[earlier]) for earlier in before)]))
    return sorted(range(len(needs)), key=lambda index: (behind[index], behind[index] > index))


def _merge_in_new_memory(calls: list[Call], form: Form, trace: Trace) -> list[Call]:
    first, forms = calls[0], [trace.form(call.result) for call in calls]
    sent, reduced = trace.new(form), trace.new(form)
    parts = [
        trace.new(Form((part_form.elements,), form.dtype, form.device), reduced.number)
        for part_form in forms
    ]
    trace.share({call.result: reduced for call in calls})  # results are views of the bucket
    return [
        Call(_FLATTEN, ([call.args[0] for call in calls],), {}, sent),
        attrs.evolve(first, args=(sent, *first.args[1:]), result=reduced),
        Call(_SPLIT, (reduced, [part_form.elements for part_form in forms]), {}, parts),
        *(
            Call(_VIEW, (part, list(part_form.shape)), {}, call.result)
            for part, part_form, call in zip(parts, forms, calls, strict=True)
        ),
    ]


@attrs.define(eq=False)
class _ScratchBuckets:
    """Writes all-reduces into scratch memory, and the matrix products that only they read.

    Args:
        trace: The step, before and after.
        memories: Has the memory.
        replacements: By index, the calls in the place of the one there.
        owners: By value in a bucket, the bucket, with which it shares its memory.
    """

    trace: Trace
    memories: Memories
    replacements: dict[int, list[Call]]
    owners: dict[Value, Value] = attrs.field(factory=dict, init=False)
    _makers: dict[Value, int] = attrs.field(init=False)
    _readers: Counter[Value] = attrs.field(init=False)
    _forms: Counter[Form] = attrs.field(factory=Counter, init=False)

    def __attrs_post_init__(self) -> None:
        self._makers = makers_of(self.trace)
        self._readers = Counter(value for call in self.trace.calls for value in call.operands)
        self._readers.update(values(self.trace.outputs))

    def merge(self, calls: list[Call], form: Form) -> list[Call]:
        bucket, first = self.trace.new(form), calls[0]
        tensor = self.memories.buffer(form, self._forms[form])
        self._forms[form] += 1
        self.trace.buffers[bucket.number] = tensor
        parts = torch.split(tensor, [self.trace.form(call.result).elements for call in calls])
        copied: dict[Value, Value] = {}
        for call, part in zip(calls, parts, strict=True):
            self._store_in(call.result, part, bucket)
            if not self._is_made_in(part, call.args[0], bucket):
                copied[call.result] = call.args[0]
        lists = list(copied), list(copied.values())
        copy = Call(torch_private.LIST_COPY, lists, {}, None, tuple(copied), first.line)
        operator, args = torch_private.all_reduce_in_place(), (bucket, *first.args[1:])
        joined = attrs.evolve(first, operator=operator, args=args, result=bucket, writes=(bucket,))
        return [copy, joined] if copied else [joined]

    def _store_in(self, value: Value, part: torch.Tensor, bucket: Value) -> None:
        self.trace.buffers[value.number] = part.view(self.trace.form(value).shape)
        self.owners[value] = bucket

    def _is_made_in(self, part: torch.Tensor, value: Value, bucket: Value) -> bool:
        """Lets the product, of which `value` is a view, write into `part`, if it can."""
        views: list[int] = []
        while value in self._makers and self._readers[value] == 1:
            index = self._makers[value]
            call = self.trace.calls[index]
            if call.operator in _INTO and self.trace.form(value).is_dense:
                self._store_in(value, part, bucket)
                into, kwargs = _INTO[call.operator], {**call.kwargs, "out": value}
                made = attrs.evolve(call, operator=into, kwargs=kwargs, writes=(value,))
                self.replacements |= {index: [made], **{view: [] for view in views}}
                return True
            if call.operator not in _VIEWS:
                return False
            views.append(index)
            value = call.args[0]
        return False
