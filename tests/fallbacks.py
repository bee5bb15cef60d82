"""Counts of operators that ran on full operands on this rank, from the engines."""

from collections import Counter

from shardcore import bootstrap


def _counters() -> list[Counter[str]]:
    if not bootstrap.is_installed():
        return []
    strategies = bootstrap.installation().binding.sessions._strategies.values()
    libraries = (getattr(each, "tensors", None) for each in strategies)
    return [each.engine.fallbacks for each in libraries if each is not None]


def fallbacks() -> Counter[str]:
    """By operator, since they were forgotten."""
    return sum(_counters(), Counter())


def forget_fallbacks() -> None:
    """Count from zero."""
    for each in _counters():
        each.clear()
