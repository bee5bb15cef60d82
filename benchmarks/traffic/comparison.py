"""Compares what shardcore sends with what XLA sends, case by case, and sums it up."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from benchmarks.traffic.sent_bytes import Traffic, from_json

# The step that `jit_compile="auto"`, the default, runs: captured, or eager if it cannot be.
DEFAULT, EAGER = "default", "eager"


@frozen
class Row:
    """One case under one strategy on one mesh.

    Attributes:
        case: Its name.
        xla: What XLA sends.
        default: What the step of `jit_compile="auto"` sends.
        eager: What the eager step sends.
        captured: Whether the default step is a captured one.
    """

    case: str
    xla: Traffic
    default: Traffic
    eager: Traffic
    captured: bool

    def step(self, kind: str) -> Traffic:
        """Give the default step, or the eager one."""
        return self.eager if kind == EAGER else self.default


@frozen
class Summary:
    """All cases under one strategy on one mesh.

    Attributes:
        cases: How many were compared.
        at_most: How many send at most what XLA sends.
        mean: The geometric mean of the ratios.
        neither: Cases in which neither sends anything; their ratio is 1.
        only_ours: Cases in which XLA sends nothing and shardcore does; not in the mean.
        only_xla: Cases in which shardcore sends nothing and XLA does; not in the mean.
        calls: Collectives of shardcore, in all cases.
        xla_calls: Collectives of XLA, in all cases.
        not_captured: Cases whose default step runs eagerly.
    """

    cases: int
    at_most: int
    mean: float
    neither: int
    only_ours: int
    only_xla: int
    calls: int
    xla_calls: int
    not_captured: int


def ratio(ours: Traffic, xla: Traffic) -> float:
    """Divide the bytes of shardcore by those of XLA; two that send nothing are equal.

    Example:
        >>> ratio(Traffic(96), Traffic(64)), ratio(Traffic(0), Traffic(0))
        (1.5, 1.0)
        >>> ratio(Traffic(96), Traffic(0)), ratio(Traffic(0), Traffic(96))
        (inf, 0.0)
    """
    if ours.sent == xla.sent:
        return 1.0
    return ours.sent / xla.sent if xla.sent else math.inf


def summarize(rows: Sequence[Row], kind: str = DEFAULT) -> Summary:
    """Sum up the rows, by their default steps or by their eager ones."""
    ratios = [ratio(row.step(kind), row.xla) for row in rows]
    finite = [each for each in ratios if 0 < each < math.inf]
    logs = [math.log(each) for each in finite]
    return Summary(
        cases=len(rows),
        at_most=sum(each <= 1 for each in ratios),
        mean=math.exp(sum(logs) / len(logs)) if logs else math.nan,
        neither=sum(not row.step(kind).sent and not row.xla.sent for row in rows),
        only_ours=sum(each == math.inf for each in ratios),
        only_xla=sum(each == 0 for each in ratios),
        calls=sum(row.step(kind).collectives for row in rows),
        xla_calls=sum(row.xla.collectives for row in rows),
        not_captured=sum(not row.captured for row in rows),
    )


def rows(ours: Mapping[str, Any], xla: Mapping[str, Any]) -> list[Row]:
    """Pair the stored answers of both sides, of the cases that both could train."""
    found = []
    for case, answer in ours.items():
        theirs = xla.get(case, {})
        if "failure" in answer or "sent" not in theirs:
            continue
        eager, captured = from_json(answer["eager"]), "captured" in answer
        default = from_json(answer["captured"]) if captured else eager
        found.append(Row(case, from_json(theirs), default, eager, captured))
    return found


def worst(rows: Iterable[Sequence[Row]]) -> list[str]:
    """Order cases by their highest ratio under any strategy, the highest first.

    Args:
        rows: Of each strategy.
    """
    highest: dict[str, tuple[float, float]] = {}
    for row in (each for strategy in rows for each in strategy):
        found = ratio(row.default, row.xla), row.default.sent
        highest[row.case] = max(found, highest.get(row.case, found))
    return sorted(highest, key=lambda case: (*highest[case], case), reverse=True)
