"""Counts operators that ran on full operands, by batch."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.fallbacks import fallbacks, forget_fallbacks
from tests.matrix.outcomes import Outcome

EVEN = 4  # rows of a batch that divide by the ranks of every mesh of the matrices
BATCHES: dict[str, list[int]] = {"even": [], "uneven": []}


def begin() -> None:
    """Forget what ran before."""
    forget_fallbacks()
    for each in BATCHES.values():
        each.clear()


@contextmanager
def batch(rows: int) -> Iterator[None]:
    """Count the fall-backs within as those of an even or of an uneven batch."""
    before = fallbacks().total()
    yield
    kind = "even" if rows % EVEN == 0 else "uneven"
    BATCHES[kind].append(fallbacks().total() - before)


def right() -> Outcome:
    """The outcome of what ran since, and was right."""
    fell_back = tuple(sorted(fallbacks()))
    kinds = {kind: _status(any(counts)) for kind, counts in BATCHES.items() if counts}
    return Outcome(_status(bool(fell_back)), "", fell_back, **kinds)


def _status(fell_back: bool) -> str:
    return "fell back" if fell_back else "ok"
