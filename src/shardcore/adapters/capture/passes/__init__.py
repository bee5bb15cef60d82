"""What a tape is made better by: each pass gives another tape that does the same."""

from collections.abc import Callable

from shardcore.adapters.capture.passes.aliases import without_aliases
from shardcore.adapters.capture.passes.buckets import in_buckets
from shardcore.adapters.capture.passes.dead_code import without_dead_code
from shardcore.adapters.capture.passes.late_waits import with_late_waits
from shardcore.adapters.capture.passes.ones import with_plain_ones
from shardcore.adapters.capture.passes.repeats import without_repeats
from shardcore.adapters.capture.passes.small_sums import with_small_sums_last
from shardcore.adapters.capture.tape import Tape

PASSES: tuple[Callable[[Tape], Tape], ...] = (
    without_aliases,
    with_plain_ones,
    without_repeats,
    without_dead_code,
    with_small_sums_last,
    in_buckets,
    with_late_waits,
)


def improved(tape: Tape) -> Tape:
    """`tape` after all passes."""
    for each in PASSES:
        tape = each(tape)
    return tape
