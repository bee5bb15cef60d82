"""Passes: each returns another trace that does the same. `run_passes` runs them in order (ADR 28).

A pass declares what it needs and keeps, and that is checked.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from enum import Enum
from functools import partial, reduce
from types import MappingProxyType

import attrs

from shardcore.adapters import torch_private
from shardcore.adapters.capture.passes import (
    cleanup,
    collectives,
    constants,
    inductor,
    memory,
    repeats,
    slices,
    sums,
)
from shardcore.adapters.capture.trace import Literals, Trace, values
from shardcore.domain.capture import NotCaptured
from shardcore.ports.capture import RecordedSum


class Fact(Enum):
    """A fact about a trace that passes rely on."""

    UNREAD_LOSS = "the backward pass does not depend on the value of the loss"
    NEW_MEMORY = "no result is written into the memory of a dead operand"


@attrs.frozen
class Pass:
    """A function from trace to trace, with what it declares.

    Each pass keeps the writes into tensors from outside the step, but for donated inputs, the
    random draws and the form of the outputs, and reads no value before a call makes it.

    Args:
        run: The function.
        needs: Facts that hold before it.
        gives: Facts that hold after it.
        breaks: Facts that may no longer hold after it.
        joins: Whether it joins or repeats collectives; else it keeps them and their order.
    """

    run: Callable[[Trace], Trace]
    needs: Set[Fact] = frozenset()
    gives: Set[Fact] = frozenset()
    breaks: Set[Fact] = frozenset()
    joins: bool = False

    @property
    def name(self) -> str:
        """The name of the function, of which `run` may be a `partial`."""
        return getattr(self.run, "func", self.run).__name__


@attrs.frozen
class Pipeline:
    """Passes in an order in which each finds the facts that it needs.

    Args:
        passes: The passes, in order.

    Raises:
        AssertionError: If a pass needs a fact that does not hold where it stands.
    """

    passes: tuple[Pass, ...]

    def __attrs_post_init__(self) -> None:
        facts = {Fact.NEW_MEMORY}  # as recorded: torch gives each result new memory
        for pass_ in self.passes:
            for fact in pass_.needs - facts:
                wrong = f"pass {pass_.name!r} stands where this may not hold: {fact.value}"
                raise AssertionError(wrong)
            facts = (facts | pass_.gives) - pass_.breaks

    def __call__(self, trace: Trace) -> Trace:
        """Runs all passes; if an effect is lost, runs them again to find the pass at fault.

        Raises:
            NotCaptured: If a pass does not keep what it declares to keep; the error names it.
        """
        final = reduce(lambda trace, pass_: pass_.run(trace), self.passes, trace)
        if _broken(trace, final, joins=any(pass_.joins for pass_ in self.passes)):
            for pass_ in self.passes:
                before, trace = trace, pass_.run(trace)
                if broken := _broken(before, trace, joins=pass_.joins):
                    raise NotCaptured(
                        f"pass {pass_.name!r} does not keep {broken}: please report it"
                    )
        return final


def _broken(before: Trace, after: Trace, *, joins: bool) -> str:
    """Names the effect that a pass did not keep; empty if it kept all that it declares."""
    names = ["writes", "draws", "outputs", *([] if joins else ["collectives"])]
    for name, old, new in zip(names, _effects(before), _effects(after), strict=False):
        if old != new:
            return name
    return "" if _is_ordered(after) else "the order of calls and their operands"


def _effects(trace: Trace) -> Iterator[Hashable]:
    """Yields the effects of a step, in the order of the names in `_broken`."""
    given = trace.given() - trace.memories(trace.inputs[: trace.donated])
    written = (trace.memory[value.number] for call in trace.calls for value in call.writes)
    yield frozenset(Counter(memory for memory in written if memory in given).items())
    draws = (call.operator for call in trace.calls if call.draws)
    yield frozenset(Counter(draws).items())
    yield tuple(trace.forms[value.number] for value in values(trace.outputs))
    yield tuple(call.collective for call in trace.calls if call.collective)


def _is_ordered(trace: Trace) -> bool:
    """Checks that each value exists before a call reads it."""
    known = {*(value.number for value in trace.inputs), *trace.outside, *trace.buffers}
    for call in trace.calls:
        if not known.issuperset(value.number for value in call.operands):
            return False
        known.update(value.number for value in call.results)
    return known.issuperset(value.number for value in values(trace.outputs))


# Inductor does these by itself, or cannot take their results.
DONATED_INPUTS = Pass(memory.with_donated_inputs)
DIRECT_VIEWS = Pass(cleanup.with_direct_views, needs={Fact.NEW_MEMORY})
OPERANDS_REUSED = Pass(memory.with_operands_reused, breaks={Fact.NEW_MEMORY})
MEMORY_FOR_GATHERS = Pass(collectives.with_memory_for_gathers)

# Inductor errs on these operators, or computes them slower than torch does.
PASSES_FOR_COMPILER = (
    Pass(inductor.with_factors_apart),
    Pass(inductor.with_plain_paddings),
    Pass(inductor.with_reshapes, needs={Fact.NEW_MEMORY}),
    Pass(inductor.with_sizes),
)


def passes_of(
    memories: sums.Memories | None,
    all_reduces: Sequence[RecordedSum] | None = None,
    literals: Literals = MappingProxyType({}),
    *,
    sends: bool = True,
    slice_calls: slices.SliceCalls | None = None,
) -> tuple[Pass, ...]:
    """Lists the passes of `run_passes`; those of communication only if the step `sends`.

    Collectives depend on agreed numbers alone until their order is settled: the other passes, which
    ask for the memory of this rank, keep that.
    """
    buckets = partial(sums.in_buckets, memories=memories, sums=all_reduces)
    of_communication = (
        Pass(collectives.with_regathers, needs={Fact.NEW_MEMORY}, joins=True),
        Pass(buckets, needs={Fact.NEW_MEMORY, Fact.UNREAD_LOSS}, joins=True),
        Pass(collectives.with_early_starts, needs={Fact.NEW_MEMORY}),
        Pass(collectives.with_late_waits, needs={Fact.NEW_MEMORY}),
    )
    once = (
        Pass(partial(repeats.without_repeated_calls, literals=literals), needs={Fact.NEW_MEMORY}),
        Pass(partial(constants.with_constants, literals=literals), needs={Fact.NEW_MEMORY}),
    )
    may_write = memories is not None
    in_slices: tuple[Pass, ...] = ()
    if slice_calls is not None and may_write:
        run = partial(slices.in_slices, slice_calls=slice_calls)
        gather = Pass(collectives.with_early_gather_of_head, needs={Fact.NEW_MEMORY}, joins=True)
        in_slices = (*((gather,) if sends else ()), Pass(run, needs={Fact.NEW_MEMORY}))
    return (
        Pass(cleanup.with_constant_loss_seed, gives={Fact.UNREAD_LOSS}),
        Pass(cleanup.without_dead_code),
        *((DONATED_INPUTS, DIRECT_VIEWS) if may_write else ()),
        *in_slices,
        *(of_communication if sends else ()),
        *((*once, OPERANDS_REUSED) if may_write else ()),
        *((MEMORY_FOR_GATHERS,) if may_write and sends else ()),
    )


def run_passes(
    trace: Trace,
    memories: sums.Memories | None = None,
    all_reduces: Sequence[RecordedSum] | None = None,
    literals: Literals = MappingProxyType({}),
    slice_calls: slices.SliceCalls | None = None,
) -> Trace:
    """Runs the passes for steps that are not compiled.

    Args:
        trace: A step.
        memories: Has the memory of buckets. None leaves out the passes that write into memory of
            others: Inductor, and steps that reshape a tensor in place, need the recorded strides.
        all_reduces: The all-reduces on which all ranks agree; by default this rank's.
        literals: The constants of the step.
        slice_calls: Finds the calls for one slice of large values; None leaves these whole.

    Raises:
        NotCaptured: If a pass does not keep what it declares to keep.
    """
    # Without collectives, those of communication take a third of the time and change nothing.
    sends = any(call.collective for call in trace.calls)
    chosen = passes_of(memories, all_reduces, literals, sends=sends, slice_calls=slice_calls)
    return Pipeline(chosen)(trace)


def run_passes_for_compiler(trace: Trace, onednn: torch_private.OneDnn) -> Trace:
    """Replaces operators on which Inductor errs or is slow."""
    products = Pass(partial(inductor.with_onednn_products, onednn=onednn))
    return Pipeline((*PASSES_FOR_COMPILER, products))(trace)
