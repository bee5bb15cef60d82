"""Outcomes of a case: on one rank, on all ranks, of one class."""

from collections.abc import Iterable

from attrs import frozen

ORDER = ("ok", "fell back", "eager", "error", "WRONG")


@frozen
class Outcome:
    """The outcome of one case.

    Args:
        status: one of `ORDER`.
        detail: what differs, what was raised, or why a step was not captured.
        fell_back: the operators that ran on full operands.
        even: "ok" or "fell back" in the steps with an even batch, "" if there was none.
        uneven: the same in all other steps.
    """

    status: str
    detail: str = ""
    fell_back: tuple[str, ...] = ()
    even: str = ""
    uneven: str = ""


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome of a case on which ranks differ."""
    return max(outcomes, key=lambda outcome: ORDER.index(outcome.status))


def class_of(case: str) -> str:
    """The class, function or model that the case is of: "Conv1D" of "Conv1D/causal"."""
    return case.partition("/")[0].partition("[")[0]
