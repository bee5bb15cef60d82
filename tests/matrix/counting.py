"""What ran how: by a rule of shardcore, or on whole operands."""

from collections import Counter
from typing import Any

from shardcore.adapters import dtensor_rules, dtensor_split, fallback
from tests.matrix.outcomes import Outcome

RULED: Counter[str] = Counter()


def count_rules() -> None:
    """Count, from now on, the operators that a rule splits."""
    choose = dtensor_split.choose

    def counting(operator: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = choose(operator, *args, **kwargs)
        if not chosen.gathers:
            RULED[str(operator)] += 1
        return chosen

    dtensor_split.choose = dtensor_rules.choose = counting


def begin() -> None:
    """Forget what ran before."""
    RULED.clear()
    fallback.CALLS.clear()


def right() -> Outcome:
    """The outcome of what ran since, and was right."""
    fell_back, by_rule = tuple(sorted(fallback.CALLS)), tuple(sorted(RULED))
    return Outcome("fell back" if fell_back else "ok", "", fell_back, by_rule)
