"""The strategies that packages offer, and the choice of one."""

import logging
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import attrs
import pluggy

from shardcore import builtin_plugins
from shardcore.domain.errors import StrategyError
from shardcore.ports import hookspecs
from shardcore.ports.strategy import StrategyEntry

logger = logging.getLogger("shardcore.install")


@attrs.frozen
class Offers:
    """What the plug-ins offer.

    Args:
        found: Every strategy, and the package that offers it, by the strategy's name.
        broken: Why a package offers nothing, by the package's name.
    """

    found: dict[str, tuple[StrategyEntry, str]] = attrs.field(factory=dict)
    broken: dict[str, str] = attrs.field(factory=dict)

    def add(self, entry: StrategyEntry, package: str) -> None:
        """Take one strategy of a package.

        Raises:
            StrategyError: If another package has taken its name.
        """
        if entry.name in self.found:
            raise StrategyError(
                f"Strategy {entry.name!r} is offered by package {self.found[entry.name][1]!r} and "
                f"by package {package!r}: uninstall one of the two, or rename its strategy."
            )
        self.found[entry.name] = (entry, package)


def entries() -> Offers:
    """Every strategy that a plug-in offers. A package that cannot be used is logged and noted.

    Raises:
        StrategyError: If two packages offer a strategy of one name; the message names them.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    offers = Offers()
    for entry in _offered(manager, builtin_plugins):
        offers.add(entry, "shardcore")
    for point in entry_points(group=hookspecs.PROJECT):
        package = _package(point)
        try:
            offered = _offered(manager, point.load())
        except Exception as error:  # noqa: BLE001 - a stranger's module may raise anything
            offers.broken[package] = _one_line("its plug-in cannot be used", error)
            logger.warning("package %r: %s", package, offers.broken[package])
            continue
        for entry in offered:
            offers.add(entry, package)
    return offers


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def _offered(manager: pluggy.PluginManager, plugin: Any) -> list[StrategyEntry]:
    """The strategies of one plug-in, which is checked against the hook."""
    manager.register(plugin)
    hooks: list[Any] = manager.hook.shardcore_strategies.get_hookimpls()
    offered = [each for hook in hooks if hook.plugin is plugin for each in hook.function()]
    for each in offered:
        if not isinstance(each, StrategyEntry):
            raise TypeError(f"shardcore_strategies() gave {each!r}, expected a StrategyEntry")
    return offered


def _one_line(what: str, error: Exception) -> str:
    return " ".join(f"{what}: {type(error).__name__}: {error}".split())


def choose(wanted: str, offers: Offers) -> tuple[StrategyEntry, dict[str, str]]:
    """The strategy to take, and why the others are not, by name.

    Raises:
        StrategyError: If there is no such strategy, or it cannot be used here.
    """
    entries = {name: entry for name, (entry, _) in offers.found.items()}
    reasons = {name: _why_unavailable(entry) for name, entry in entries.items()}
    if wanted == "auto":
        chosen = _preferred([entry for name, entry in entries.items() if not reasons[name]])
    elif wanted not in entries:
        raise _no_such(wanted, offers)
    elif reasons[wanted]:
        raise StrategyError(f"Strategy {wanted!r} cannot be used here: {reasons[wanted]}")
    else:
        chosen = entries[wanted]
    goes_before = wanted == "auto"
    others = {
        name: _why_not(entry, reasons[name], chosen, goes_before) for name, entry in entries.items()
    }
    del others[chosen.name]
    return chosen, {**others, **offers.broken}


def _preferred(usable: list[StrategyEntry]) -> StrategyEntry:
    ranked = [(entry.preference, entry) for entry in usable if entry.preference is not None]
    return max(ranked, key=lambda each: each[0])[1]


def _no_such(wanted: str, offers: Offers) -> StrategyError:
    broken = [f"package {package!r}: {reason}" for package, reason in offers.broken.items()]
    remedy = (
        f"Or is it one of these: {'; '.join(broken)}"
        if broken
        else "A third party's is offered by its package: is it installed in this environment?"
    )
    names = ", ".join(map(repr, offers.found))
    return StrategyError(f"No strategy {wanted!r}: there are {names}, and 'auto'. {remedy}")


def _why_unavailable(entry: StrategyEntry) -> str | None:
    try:
        return entry.why_unavailable()
    except Exception as error:  # noqa: BLE001 - a stranger's function may raise anything
        return _one_line("why_unavailable() failed", error)


def _why_not(
    entry: StrategyEntry, reason: str | None, chosen: StrategyEntry, goes_before: bool
) -> str:
    if reason:
        return reason
    if not goes_before:
        return f"{chosen.name!r} was asked for."
    if entry.preference is None:
        return "taken only when it is asked for by name."
    return f"{chosen.name!r} goes before it."
