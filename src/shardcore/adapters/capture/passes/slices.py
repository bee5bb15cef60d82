"""Computes the largest values of a step in slices: rows in time instead of over ranks (ADR 60).

A language model multiplies each token by the embedding of its whole vocabulary. The logits, their
casts and their gradients take more memory than all layers below. The calls that read or write such
values become a region, which runs once for each slice of the rows: it holds one slice at a time.

How a call is sliced follows from the rule by which the engine shards it (`adapters.slicing`).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from shardcore.adapters.capture.analyses import live_bytes, needs_of, with_needs
from shardcore.adapters.capture.passes.unrolled import Region, SlicedCalls, Unrolled
from shardcore.adapters.capture.trace import Call, Form, Number, Trace, Value, values
from shardcore.adapters.torch_private import tree_leaves
from shardcore.domain.capture import LARGE_VALUE
from shardcore.domain.layouts.placements import Partial, Placement, Shard, segments_of

# A product of fewer rows takes longer for a row.
LEAST_ROWS = 128
# The head of a model and its loss have fewer calls; a region with a layer below it has more.
MOST_CALLS = 64
# Twice as many slices are worth their calls if they leave this share of the peak, or less.
WORTHWHILE = 0.9

# An input that is sliced, the dim, and its segments, each of which is sliced.
Seed = tuple[Value, int, int]


class SliceCalls(Protocol):
    """Finds the calls of a region for one slice of its rows."""

    def __call__(self, region: Region, trace: Trace, seed: Seed, slices: int) -> SlicedCalls | None:
        """Returns None if it is not proven that slices give the same results.

        Args:
            region: The calls.
            trace: The step.
            seed: An input that is sliced. Which others are sliced follows.
            slices: The number of slices, which divides each segment of that dim.
        """


def in_slices(trace: Trace, slice_calls: SliceCalls) -> Trace:
    """Runs the calls with the largest values of the step once for each slice of their rows.

    Losses and gradients of weights are summed over the slices, half-precision ones in float32. The
    step stays as it is if slices do not lower its peak, or are not proven to give its results.
    """
    region = _region(trace)
    if region is None:
        return trace
    best, peak = trace, max(live_bytes(trace))
    seeds = list(_seeds(region, trace))
    slices = 2
    rows = region.largest.elements // region.largest.shape[-1]
    while rows // slices >= LEAST_ROWS:
        first = next(_sliced(region, trace, seeds, slices, slice_calls), None)
        if first is None:
            break
        seed, sliced = first
        sliced_peak = max(live_bytes(sliced))
        if sliced_peak > WORTHWHILE * peak:
            break
        best, peak, seeds = sliced, sliced_peak, [seed, *seeds]
        slices *= 2
    return best


def _region(trace: Trace) -> Region | None:
    """Finds the calls that read or write values with as many elements as the largest one.

    None if that is small, or if they and what is between them cannot run one after another.
    """
    made = [trace.forms[value.number] for call in trace.calls for value in call.results]
    largest = max(filter(None, made), key=lambda form: form.bytes, default=None)
    if largest is None or largest.bytes < LARGE_VALUE or len(largest.shape) < 2:
        return None
    core = [index for index, call in enumerate(trace.calls) if _touches(call, largest, trace)]
    needs = needs_of(trace)
    needed = set(with_needs(core, needs))
    dependent = set(core)
    for index, of_call in enumerate(needs):
        if of_call & dependent:
            dependent.add(index)
    inside = needed & dependent
    calls = [trace.calls[index] for index in sorted(inside)]
    if len(calls) > MOST_CALLS or not all(_can_be_sliced(call, trace) for call in calls):
        return None
    rest = [index for index in range(len(trace.calls)) if index not in inside]
    # What comes first in the step stays there; of what comes later, all that the region needs.
    order = sorted(rest, key=lambda index: (index > min(inside) and index not in needed, index))
    count = sum(index < min(inside) or index in needed for index in rest)
    sends = [index for index in order if trace.calls[index].collective]
    outside = [trace.calls[index] for index in order]
    before, after = outside[:count], outside[count:]
    inputs, outputs = _edges(calls, after, trace)
    memories = trace.memories(outputs)
    if sends != sorted(sends) or len(memories) < len(outputs):
        return None
    if not all(trace.form(value).is_dense for value in outputs):
        return None
    if memories & trace.memories(inputs):
        return None
    return Region(calls, inputs, outputs, before, after, largest)


def _touches(call: Call, largest: Form, trace: Trace) -> bool:
    forms = [trace.forms[value.number] for value in (*call.operands, *call.results)]
    return any(form is not None and form.elements == largest.elements for form in forms)


def _can_be_sliced(call: Call, trace: Trace) -> bool:
    leaves = tree_leaves((call.args, call.kwargs))
    return (
        call.name.startswith("aten.")
        and not (call.writes or call.draws)
        and not any(isinstance(leaf, Number) for leaf in leaves)
        and all(trace.forms[value.number] is not None for value in call.operands)
    )


def _edges(
    calls: Sequence[Call], after: Sequence[Call], trace: Trace
) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """Lists the values that a region reads, and those that it makes for the calls after it."""
    made = dict.fromkeys(value for call in calls for value in call.results)
    inputs = dict.fromkeys(v for call in calls for v in call.operands if v not in made)
    read = {*(value for call in after for value in call.operands), *values(trace.outputs)}
    return tuple(inputs), tuple(value for value in made if value in read)


def _seeds(region: Region, trace: Trace) -> Iterator[Seed]:
    """Yields the inputs that may be sliced, and how; last the rows of each example of a batch."""
    forms = [trace.forms[value.number] for call in region.calls for value in call.results]
    examples = {form.shape[0] for form in forms if form is not None and len(form.shape) > 2} - {1}
    for count in (1, *sorted(examples)):
        for value in region.inputs:
            for dim in range(len(trace.form(value).shape)):
                yield value, dim, count


def _sliced(
    region: Region, trace: Trace, seeds: Iterable[Seed], slices: int, slice_calls: SliceCalls
) -> Iterator[tuple[Seed, Trace]]:
    """Yields the step with the region in slices, for each seed for which that is proven."""
    for seed in seeds:
        value, dim, count = seed
        if trace.form(value).shape[dim] % (slices * count):
            continue
        calls = slice_calls(region, trace, seed, slices)
        if calls is None or any(
            _touches(call, region.largest, calls.trace) for call in calls.trace.calls
        ):
            continue
        if _can_be_joined(calls, region, trace, slices):
            yield seed, Unrolled(trace, region, calls, slices).step()


def _can_be_joined(calls: SlicedCalls, region: Region, trace: Trace, slices: int) -> bool:
    """Tells whether inputs can be cut into equal slices, and outputs be made of those of slices."""
    pairs: list[tuple[Value, Placement]] = [
        *zip(region.inputs, calls.inputs, strict=True),
        *zip(region.outputs, calls.outputs, strict=True),
    ]
    for value, placement in pairs:
        if isinstance(placement, Shard):
            size, segments = trace.form(value).shape[placement.dim], segments_of(placement.block)
            if segments.outer or size % (slices * segments.count * segments.block):
                return False
        elif isinstance(placement, Partial) and placement.op != "sum":
            return False
    return True
