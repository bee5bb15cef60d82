"""Sharding rules that packages offer for their operators."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

from shardcore.bootstrap import plugin_calls
from shardcore.domain.errors import ArgumentProblem, PluginError
from shardcore.reporting.logs import log_of

logger = log_of("install")

HOOK = "shardcore_operator_rules"

Rules: TypeAlias = Iterable[tuple[object, str]]
Offered: TypeAlias = tuple[str, Callable[[], Rules]]


def declare(
    offered: Iterable[Offered], declare_rule: Callable[[object, str], None]
) -> dict[str, str]:
    """Declares the rules of all packages, and warns of each that cannot be declared.

    Args:
        offered: The functions that give the rules, each with its package.
        declare_rule: Declares a rule.

    Returns:
        The last reason against a rule of each package that has one.

    Example:
        >>> declare([("numbers", lambda: [("one", "n -> n")])], lambda operator, text: None)
        {}
    """
    broken: dict[str, str] = {}
    for package, function in offered:
        try:
            name = f"its hook {HOOK}()"
            rules = plugin_calls.call(partial(_pairs, function), name, package)
        except PluginError as error:
            broken[package] = str(error)
            logger.warning("package %r: %s", package, error)
            continue
        for operator, text in rules:
            try:
                declare_rule(operator, text)
            except ArgumentProblem as error:
                broken[package] = str(error)
                logger.warning("package %r: %s", package, error)
    return broken


def _pairs(function: Callable[[], Rules]) -> list[tuple[object, str]]:
    return [(operator, text) for operator, text in function()]
