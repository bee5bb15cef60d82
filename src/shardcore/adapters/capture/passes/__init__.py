"""Passes: each returns another tape that does the same. `improved` runs them in order."""

from functools import partial

from shardcore.adapters import torch_private
from shardcore.adapters.capture.passes.cleanup import (
    with_direct_views,
    with_plain_ones,
    without_dead_code,
)
from shardcore.adapters.capture.passes.communication.overlap import (
    with_early_starts,
    with_late_waits,
)
from shardcore.adapters.capture.passes.communication.regather import with_regathers
from shardcore.adapters.capture.passes.communication.sums import in_buckets, with_small_sums_last
from shardcore.adapters.capture.passes.inductor import (
    with_factors_apart,
    with_onednn_products,
    with_plain_paddings,
    with_reshapes,
    with_sizes,
)
from shardcore.adapters.capture.passes.memory.kept_buckets import Memories, with_kept_buckets
from shardcore.adapters.capture.passes.memory.reuse import with_operands_reused
from shardcore.adapters.capture.passes.pipeline import Collectives, Fact, Pass, Pipeline
from shardcore.adapters.capture.tape import Tape

_CLEANUP = (
    Pass(with_plain_ones, gives={Fact.UNREAD_LOSS}),
    Pass(without_dead_code),
)
_SMALL_SUMS = Pass(with_small_sums_last, needs={Fact.UNREAD_LOSS}, collectives=Collectives.MOVED)
_REGATHERS = Pass(with_regathers, needs={Fact.NEW_MEMORY}, collectives=Collectives.CHANGED)
_EARLY_STARTS = Pass(with_early_starts, needs={Fact.NEW_MEMORY}, collectives=Collectives.MOVED)
_BUCKETS = Pass(
    in_buckets,
    needs={Fact.NEW_MEMORY},
    gives={Fact.BUCKETS},
    collectives=Collectives.CHANGED,
)
_LATE_WAITS = Pass(with_late_waits, needs={Fact.NEW_MEMORY})

PASSES = (*_CLEANUP, _SMALL_SUMS, _REGATHERS, _EARLY_STARTS, _BUCKETS, _LATE_WAITS)

# For ranks with local shards of different sizes. Their collectives depend on the agreed bytes of
# all-reduces alone: these are in buckets before a pass asks for the memory of this rank.
PASSES_ALIKE = (*_CLEANUP, _REGATHERS, _BUCKETS, _EARLY_STARTS, _LATE_WAITS)

# Inductor does these by itself, or cannot take their results.
PASSES_WITHOUT_COMPILER = (
    Pass(with_direct_views, needs={Fact.NEW_MEMORY}),
    Pass(with_operands_reused, breaks={Fact.NEW_MEMORY}),
)

# Inductor errs on these operators, or computes them slower than torch does.
PASSES_FOR_COMPILER = (
    Pass(with_factors_apart),
    Pass(with_plain_paddings),
    Pass(with_reshapes, needs={Fact.NEW_MEMORY}),
    Pass(with_sizes),
)


def improved(tape: Tape, memories: Memories | None = None, *, alike: bool = False) -> Tape:
    """Returns `tape` after all passes.

    Args:
        tape: A step.
        memories: Has the memory of buckets. None leaves out the passes that write into memory of
            others: Inductor, and steps that reshape a tensor in place, need the recorded strides.
        alike: Whether its collectives must be those of ranks with local shards of other sizes.

    Raises:
        NotCaptured: If a pass does not keep what it declares to keep.
    """
    passes = PASSES_ALIKE if alike else PASSES
    if memories is not None:
        buckets = Pass(partial(with_kept_buckets, memories=memories), needs={Fact.BUCKETS})
        passes = (*passes, *PASSES_WITHOUT_COMPILER, buckets)
    return Pipeline(passes)(tape)


def improved_for_compiler(tape: Tape, onednn: torch_private.OneDnn) -> Tape:
    """Returns the part of an improved tape that Inductor compiles, after its passes."""
    products = Pass(partial(with_onednn_products, onednn=onednn))
    return Pipeline((*PASSES_FOR_COMPILER, products))(tape)
