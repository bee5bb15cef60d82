"""What ran how: by a rule of shardcore, or on whole operands."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardcore.adapters import fallback
from shardcore.adapters.engine import planned
from tests.matrix.outcomes import Outcome

EVEN = 4  # rows of a batch that divide by the ranks of every mesh of the matrices
RULED: Counter[str] = Counter()
BATCHES: dict[str, list[int]] = {"even": [], "uneven": []}


def count_rules() -> None:
    """Count, from now on, the operators that a rule splits."""
    run = planned.Plan.run

    def counting(plan: planned.Plan, *args: Any) -> Any:
        if not plan.split.gathers:
            RULED[str(plan.operator)] += 1
        return run(plan, *args)

    planned.Plan.run = counting  # type: ignore[method-assign]


def begin() -> None:
    """Forget what ran before."""
    RULED.clear()
    fallback.CALLS.clear()
    for each in BATCHES.values():
        each.clear()


@contextmanager
def batch(rows: int) -> Iterator[None]:
    """Count the fall-backs within as those of an even or of an uneven batch."""
    before = fallback.CALLS.total()
    yield
    kind = "even" if rows % EVEN == 0 else "uneven"
    BATCHES[kind].append(fallback.CALLS.total() - before)


def right() -> Outcome:
    """The outcome of what ran since, and was right."""
    fell_back, by_rule = tuple(sorted(fallback.CALLS)), tuple(sorted(RULED))
    kinds = {kind: _status(any(counts)) for kind, counts in BATCHES.items() if counts}
    return Outcome(_status(bool(fell_back)), "", fell_back, by_rule, **kinds)


def _status(fell_back: bool) -> str:
    return "fell back" if fell_back else "ok"
