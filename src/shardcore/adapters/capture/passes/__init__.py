"""What a tape is made better by: each pass gives another tape that does the same."""

from collections.abc import Callable

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.passes.cleanup import (
    with_direct_views,
    with_plain_ones,
    without_aliases,
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
from shardcore.adapters.capture.passes.memory.reuse import (
    with_operands_reused,
    without_needless_copies,
)
from shardcore.adapters.capture.tape import Tape

PASSES: tuple[Callable[[Tape], Tape], ...] = (
    without_aliases,
    with_plain_ones,
    without_dead_code,
    with_small_sums_last,
    with_regathers,
    with_early_starts,
    in_buckets,
    with_late_waits,
)

# For ranks with parts of other sizes. What is started, and in which order, hangs on the bytes alone
# that are told of all-reduces: they are in buckets before anything hangs on what a rank holds.
PASSES_ALIKE: tuple[Callable[[Tape], Tape], ...] = (
    without_aliases,
    with_plain_ones,
    without_dead_code,
    with_regathers,
    in_buckets,
    with_early_starts,
    with_late_waits,
)

# What Inductor does by itself, or cannot take.
PASSES_WITHOUT_COMPILER: tuple[Callable[[Tape], Tape], ...] = (
    with_direct_views,
    without_needless_copies,
    with_operands_reused,
)

# What Inductor takes otherwise than the step had it, or computes slower than need be.
PASSES_FOR_COMPILER: tuple[Callable[[Tape], Tape], ...] = (
    with_factors_apart,
    without_needless_copies,
    with_plain_paddings,
    with_reshapes,
    with_sizes,
)


def improved(tape: Tape, *, alike: bool = False, compiled: bool = False) -> Tape:
    """Returns `tape` after all passes but that which keeps memory.

    Args:
        tape: A step.
        alike: Whether its collectives must be those of ranks with parts of other sizes.
        compiled: Whether it is for Inductor, or reshapes a tensor in place: the last passes must
            know the strides of each tensor.
    """
    passes = PASSES_ALIKE if alike else PASSES
    for each in passes if compiled else (*passes, *PASSES_WITHOUT_COMPILER):
        tape = each(tape)
    return tape


def improved_for_compiler(tape: Tape, onednn: torch_compat.OneDnn) -> Tape:
    """Returns what is to be compiled of an improved tape, after the passes for Inductor alone."""
    for each in PASSES_FOR_COMPILER:
        tape = each(tape)
    return with_onednn_products(tape, onednn)
