"""Many items on forked ranks, one fork for all: an item that kills its ranks costs that item alone.

Each rank notes what came of an item before it goes on. When a rank dies, hangs or fails alone, its
group cannot be used again: what it did not reach is run in a new fork.
"""

import contextlib
import gc
import logging
import pickle
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache

from shardcore.testing import RankFailed, run_ranks

# Seconds for one item on a loaded machine, unless more are asked for; then its ranks are ended.
ITEM_SECONDS = 300


@frozen
class Ended:
    """An item at which the ranks ended: why, and what each rank noted before."""

    why: str
    noted: list[Any] = field(factory=list)


def run_all(
    items: dict[str, Any],
    ranks: int,
    start: Callable[[int], Callable[[Any], Any]],
    failed: Callable[[Any], bool],
    seconds: int | None = None,
) -> dict[str, list[Any] | Ended]:
    """The result of each item on each rank.

    Args:
        items: by name.
        ranks: how many.
        start: called once on each rank; gives the function that is called with every item.
        failed: whether a result says that the item raised on its rank.
        seconds: for one item; if None, `ITEM_SECONDS`.
    """
    found: dict[str, list[Any] | Ended] = {}
    left = dict(items)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            why = _run(left, ranks, start, failed, seconds or ITEM_SECONDS, Path(folder))
            noted = [_read(Path(folder) / str(rank)) for rank in range(ranks)]
        for name in noted[0]:
            if all(name in notes for notes in noted):
                found[name] = [notes[name] for notes in noted]
                del left[name]
        if why and left:  # the item at which it happened
            name = next(iter(left))
            found[name] = Ended(why, [notes[name] for notes in noted if name in notes])
            del left[name]
    return found


def _run(
    items: dict[str, Any],
    ranks: int,
    start: Callable[[int], Callable[[Any], Any]],
    failed: Callable[[Any], bool],
    seconds: int,
    notes: Path,
) -> str:
    """Run the items until the ranks part ways; what ended them, "" if nothing did."""

    def program(rank: int) -> None:
        gc.freeze()  # else each `clear_session`, which collects, looks through all of torch
        warnings.simplefilter("ignore")  # Keras' and torch's own, which tests make errors
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends even a rank that waits for others
        one = start(rank)
        logging.getLogger("shardcore").setLevel(logging.ERROR)  # fall-backs are counted
        remember_plans()
        with (notes / str(rank)).open("wb") as file:
            for done, (name, item) in enumerate(items.items()):
                if rank == 0 and done and done % 50 == 0:
                    print(f"  {done} of {len(items)}", file=sys.stderr, flush=True)
                signal.alarm(seconds)
                _clear_fast_path_sharding_prop_cache()  # so that each item reports its fall-backs
                result = one(item)
                pickle.dump((name, result), file)
                file.flush()
                if _part_ways(failed(result), ranks):
                    break
        signal.alarm(0)

    try:
        run_ranks(program, ranks, timeout=seconds * len(items), init=ranks > 1)
    except RankFailed as ended:
        return str(ended)
    return ""


def _part_ways(failed: bool, ranks: int) -> bool:
    """Returns whether only some ranks failed, so that their group cannot be used again."""
    if ranks == 1:
        return False
    everyone: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(everyone, failed)
    return len(set(everyone)) > 1


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ended = (FileNotFoundError, EOFError, pickle.UnpicklingError)
    with contextlib.suppress(*ended), path.open("rb") as file:
        while True:
            name, result = pickle.load(file)
            found[name] = result
    return found


def remember_plans() -> None:
    """Keep what DTensor finds out about an operator for all items, which else it forgets here."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding_non_cached = propagator.propagate_op_sharding
