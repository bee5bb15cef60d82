"""Passes: each returns another trace that does the same. `run_passes` runs them in order."""

from collections.abc import Sequence
from functools import partial

from shardcore.adapters import torch_private
from shardcore.adapters.capture.passes.cleanup import (
    with_constant_loss_seed,
    with_direct_views,
    without_dead_code,
)
from shardcore.adapters.capture.passes.collectives import (
    with_early_starts,
    with_late_waits,
    with_memory_for_gathers,
    with_regathers,
)
from shardcore.adapters.capture.passes.inductor import (
    with_factors_apart,
    with_onednn_products,
    with_plain_paddings,
    with_reshapes,
    with_sizes,
)
from shardcore.adapters.capture.passes.memory import with_donated_inputs, with_operands_reused
from shardcore.adapters.capture.passes.pipeline import Fact, Pass, Pipeline
from shardcore.adapters.capture.passes.sums import Memories, in_buckets
from shardcore.adapters.capture.trace.trace import Trace
from shardcore.ports.capture import RecordedSum

# Inductor does these by itself, or cannot take their results.
DONATED_INPUTS = Pass(with_donated_inputs)
DIRECT_VIEWS = Pass(with_direct_views, needs={Fact.NEW_MEMORY})
OPERANDS_REUSED = Pass(with_operands_reused, breaks={Fact.NEW_MEMORY})
MEMORY_FOR_GATHERS = Pass(with_memory_for_gathers)

# Inductor errs on these operators, or computes them slower than torch does.
PASSES_FOR_COMPILER = (
    Pass(with_factors_apart),
    Pass(with_plain_paddings),
    Pass(with_reshapes, needs={Fact.NEW_MEMORY}),
    Pass(with_sizes),
)


def passes_of(
    memories: Memories | None,
    all_reduces: Sequence[RecordedSum] | None = None,
    *,
    sends: bool = True,
) -> tuple[Pass, ...]:
    """Lists the passes of `run_passes`; those of communication only if the step `sends`.

    Collectives depend on agreed numbers alone until their order is settled: the other passes, which
    ask for the memory of this rank, keep that.
    """
    buckets = partial(in_buckets, memories=memories, sums=all_reduces)
    of_communication = (
        Pass(with_regathers, needs={Fact.NEW_MEMORY}, joins=True),
        Pass(buckets, needs={Fact.NEW_MEMORY, Fact.UNREAD_LOSS}, joins=True),
        Pass(with_early_starts, needs={Fact.NEW_MEMORY}),
        Pass(with_late_waits, needs={Fact.NEW_MEMORY}),
    )
    may_write = memories is not None
    return (
        Pass(with_constant_loss_seed, gives={Fact.UNREAD_LOSS}),
        Pass(without_dead_code),
        *((DONATED_INPUTS, DIRECT_VIEWS) if may_write else ()),
        *(of_communication if sends else ()),
        *((OPERANDS_REUSED,) if may_write else ()),
        *((MEMORY_FOR_GATHERS,) if may_write and sends else ()),
    )


def run_passes(
    trace: Trace, memories: Memories | None = None, all_reduces: Sequence[RecordedSum] | None = None
) -> Trace:
    """Runs the passes for steps that are not compiled.

    Args:
        trace: A step.
        memories: Has the memory of buckets. None leaves out the passes that write into memory of
            others: Inductor, and steps that reshape a tensor in place, need the recorded strides.
        all_reduces: The all-reduces on which all ranks agree; by default this rank's.

    Raises:
        NotCaptured: If a pass does not keep what it declares to keep.
    """
    # Without collectives, those of communication take a third of the time and change nothing.
    sends = any(call.collective for call in trace.calls)
    return Pipeline(passes_of(memories, all_reduces, sends=sends))(trace)


def run_passes_for_compiler(trace: Trace, onednn: torch_private.OneDnn) -> Trace:
    """Replaces operators on which Inductor errs or is slow."""
    products = Pass(partial(with_onednn_products, onednn=onednn))
    return Pipeline((*PASSES_FOR_COMPILER, products))(trace)
