"""What ran how: by a rule of shardcore, or on whole operands."""

from collections import Counter
from typing import Any

from shardcore.adapters import fallback
from shardcore.adapters.engine import planned
from tests.matrix.outcomes import Outcome

RULED: Counter[str] = Counter()


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


def right() -> Outcome:
    """The outcome of what ran since, and was right."""
    fell_back, by_rule = tuple(sorted(fallback.CALLS)), tuple(sorted(RULED))
    return Outcome("fell back" if fell_back else "ok", "", fell_back, by_rule)
