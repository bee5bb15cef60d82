"""Kinds of faults: how often each was tried, and how often what was promised held."""

from collections.abc import Callable, Iterable

import attrs


@attrs.frozen
class Kind:
    """A kind of fault.

    Args:
        name: What happens: "cut of an index".
        tried: How many times it was tried.
        held: How many of these times the outcome was the promised one.
        problems: The outcomes that were not.
    """

    name: str
    tried: int
    held: int
    problems: tuple[str, ...] = ()

    @classmethod
    def once(cls, name: str, problem: str | None = None) -> "Kind":
        """Returns a kind that was tried once."""
        return cls.of(name, [problem])

    @classmethod
    def of(cls, name: str, outcomes: Iterable[str | None]) -> "Kind":
        """Returns a kind with the outcome of each time: None, or the problem."""
        times = list(outcomes)
        problems = tuple(problem for problem in times if problem is not None)
        return cls(name, len(times), len(times) - len(problems), problems)


def tried(name: str, times: int, work: Callable[[], list[Kind]]) -> list[Kind]:
    """Returns the kinds that `work` returns; if it fails, one of so many times that did not hold.

    The error does not say which of the times it was.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - it is reported
        return [Kind(name, times, 0, (f"{type(error).__name__}: {error}",))]


def grouped(cases: Iterable[tuple[str, str]], good: tuple[str, ...]) -> list[Kind]:
    """Returns the kinds of generated cases, in the order of their names.

    Args:
        cases: The name of the kind and the outcome of each case.
        good: The outcomes that are promised.
    """
    outcomes: dict[str, list[str | None]] = {}
    for number, (name, outcome) in enumerate(cases):
        problem = None if outcome in good else f"case {number}: {outcome}"
        outcomes.setdefault(name, []).append(problem)
    return [Kind.of(name, outcomes[name]) for name in sorted(outcomes)]
