"""Real ranks for a test, in a gloo group."""

from collections.abc import Callable
from typing import TypeVar

from shardcore.bootstrap.ranks import launching

_Result = TypeVar("_Result")


def run_ranks(
    fn: Callable[..., _Result],
    world_size: int,
    *args: object,
    timeout: float = 60,
    init: bool = True,
) -> list[_Result]:
    """Runs `fn(rank, *args)` on `world_size` real ranks and returns their results.

    The ranks are forked from this process, so `fn` and `args` may be anything, closures included.
    Import torch and Keras first, and compute nothing with them in this process: thread pools do not
    survive a fork. Where torch refuses to compute in a forked process, since this one has used a
    GPU, they are new interpreters, as those of `shardcore.launch`. `run_ranks(fn, 1)` is a
    reference run on one device. In each rank the environment is as `torchrun` sets it, torch uses
    one thread, Keras has a fresh session, and the rank runs its `atexit` functions after `fn`.

    Args:
        fn: Called as `fn(rank, *args)`; its result must be picklable.
        world_size: The number of ranks, at least 1.
        *args: Further arguments of `fn`.
        timeout: Seconds for the whole call, after which all ranks are killed.
        init: Whether to start the gloo group before `fn` is called; if False, `fn` may start
            one itself from the environment.

    Returns:
        The results in the order of ranks.

    Raises:
        MeshError: If `world_size` is below 1.
        RankFailed: If a rank raised, died or did not end in time. The message begins with the
            first failing rank's traceback, or has the stack of every late rank. No rank is left.

    Example:
        >>> run_ranks(lambda rank, base: base + rank, 2, 10, init=False)
        [10, 11]
    """
    from shardcore.adapters.ranks.job.started_ranks import Case

    return launching.run_ranks(Case(fn, args, timeout, init), world_size)
