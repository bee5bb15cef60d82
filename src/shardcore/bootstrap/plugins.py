"""Strategies and policies that packages offer, and the choice of one."""

import inspect
from collections.abc import Collection, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

import attrs
import pluggy

from shardcore import builtin_plugins
from shardcore.bootstrap import plugin_calls, plugin_rules
from shardcore.domain.errors import PluginError, PolicyError, ShardcoreError, StrategyError
from shardcore.ports import hookspecs, policy, strategy
from shardcore.ports.policy import PolicyEntry
from shardcore.ports.strategy import StrategyEntry
from shardcore.reporting.logs import log_of

logger = log_of("install")

E = TypeVar("E", StrategyEntry, PolicyEntry)

OURS = "shardcore"


@attrs.frozen
class Hook(Generic[E]):
    """A hook by which packages offer something.

    Args:
        name: The hook's name.
        what: What it offers, for messages.
        entry: The type of what it gives.
        error: The type of the errors about it.
        contract: The version of the contract of what it offers.
    """

    name: str
    what: str
    entry: type[E]
    error: type[ShardcoreError]
    contract: int

    def check_options(self, name: str, options: Collection[str], known: Collection[str]) -> None:
        """Refuses options that the entry of that name does not know."""
        for option in options:
            if option not in known:
                has = ", ".join(known) or "none"
                what = f"{self.what.capitalize()} {name!r}"
                raise self.error(f"{what} has no option {option!r}; it has {has}.")


STRATEGIES = Hook(
    "shardcore_strategies", "strategy", StrategyEntry, StrategyError, strategy.CONTRACT
)
POLICIES = Hook("shardcore_policies", "policy", PolicyEntry, PolicyError, policy.CONTRACT)


@attrs.frozen
class Offers(Generic[E]):
    """The entries that plug-ins offer by one hook.

    Args:
        hook: The hook.
        entries: Every entry by its name.
        broken: The reasons against the entries of packages, by the names of the packages.
    """

    hook: Hook[E]
    entries: dict[str, E] = attrs.field(factory=dict)
    broken: dict[str, str] = attrs.field(factory=dict)
    _first: dict[str, str] = attrs.field(factory=dict, init=False)

    def add(self, entry: E, package: str) -> None:
        """Adds an entry of a package; refuses a name that is ours, or that two packages use."""
        if entry.name not in self._first:
            self._first[entry.name] = package
            self.entries[entry.name] = attrs.evolve(entry, package=package)
            return
        first = self._first[entry.name]
        reason = (
            f"{self.hook.what} {entry.name!r} is offered by package {first!r} and by package "
            f"{package!r}: uninstall one of the two, or rename its {self.hook.what}."
        )
        self.broken[package] = reason
        if first != OURS:
            self.entries.pop(entry.name, None)
            self.broken[first] = reason

    def get(self, name: str, *others: str) -> E:
        """Looks up the entry of that name.

        Raises:
            ShardcoreError: If there is none: it names those that there are, besides `others`, and
                what cannot be had.
        """
        if name in self.entries:
            return self.entries[name]
        names = ", ".join(map(repr, (*self.entries, *others)))
        broken = [f"package {package!r}: {reason}" for package, reason in self.broken.items()]
        remedy = (
            f"Or is it one of these: {'; '.join(broken)}"
            if broken
            else "A third party's is offered by its package: is it installed in this environment?"
        )
        raise self.hook.error(f"No {self.hook.what} {name!r}: there are {names}. {remedy}")


@attrs.frozen
class Plugins:
    """All strategies, policies and rules of operators: of shardcore and of other packages."""

    strategies: Offers[StrategyEntry] = attrs.field(factory=partial(Offers, STRATEGIES))
    policies: Offers[PolicyEntry] = attrs.field(factory=partial(Offers, POLICIES))
    # Functions, which `install()` calls when torch is loaded.
    rules: list[plugin_rules.Offered] = attrs.field(factory=list)

    def log(self) -> None:
        """Logs each reason against a package once."""
        every = [*self.strategies.broken.items(), *self.policies.broken.items()]
        for package, reason in dict.fromkeys(every):
            logger.warning("package %r: %s", package, reason)


def load() -> Plugins:
    """Loads all that packages offer; reasons against a package are recorded, not raised."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    loaded = Plugins()
    manager.register(builtin_plugins)
    _add_all(manager, builtin_plugins, OURS, loaded)
    for point in entry_points(group=hookspecs.PROJECT):
        package = point.dist.name if point.dist is not None else point.module
        try:
            plugin = _register(manager, point, package)
        except PluginError as error:
            loaded.strategies.broken[package] = loaded.policies.broken[package] = str(error)
        else:
            _add_all(manager, plugin, package, loaded)
    return loaded


def _register(manager: pluggy.PluginManager, point: EntryPoint, package: str) -> object:
    """Imports, registers and returns the plug-in of a package.

    Raises:
        PluginError: If it cannot be imported, or its hooks are not ours.
    """
    plugin = plugin_calls.call(point.load, f"the import of its plug-in {point.value!r}", package)
    try:
        manager.register(plugin)
    except pluggy.PluginValidationError as error:
        raise PluginError(" ".join(str(error).split())) from error
    _check_hooks(manager, plugin)
    return plugin


def _add_all(manager: pluggy.PluginManager, plugin: object, package: str, loaded: Plugins) -> None:
    """Adds what a plug-in offers by each hook; if a hook fails, the others still count."""
    every: tuple[Offers[Any], ...] = (loaded.strategies, loaded.policies)
    for offers in every:
        try:
            entries = _entries_of(manager, plugin, offers.hook, package)
        except PluginError as error:
            offers.broken[package] = str(error)
            continue
        for entry in entries:
            offers.add(entry, package)
    functions = _functions_of(manager, plugin, plugin_rules.HOOK)
    loaded.rules.extend((package, function) for function in functions)


def _functions_of(manager: pluggy.PluginManager, plugin: object, hook: str) -> list[Any]:
    implementations = getattr(manager.hook, hook).get_hookimpls()
    return [of_hook.function for of_hook in implementations if of_hook.plugin is plugin]


def _entries_of(
    manager: pluggy.PluginManager, plugin: object, hook: Hook[E], package: str
) -> list[E]:
    name = f"its hook {hook.name}()"
    functions = _functions_of(manager, plugin, hook.name)
    offered = plugin_calls.call(
        lambda: [entry for function in functions for entry in function()], name, package
    )
    for entry in offered:
        if not isinstance(entry, hook.entry):
            raise PluginError(
                f"{name} gave {entry!r}, expected a {hook.entry.__name__}", name=entry
            )
        if entry.contract != hook.contract:
            raise PluginError(
                f"{name} gave {hook.what} {entry.name!r} for version {entry.contract} of the "
                f"contract, and this shardcore has version {hook.contract}: install releases of "
                "both that fit together",
                name=entry.name,
            )
    return offered


def _check_hooks(manager: pluggy.PluginManager, plugin: object) -> None:
    known = [name for name in vars(hookspecs) if name.startswith("shardcore_")]
    own = [caller.name for caller in manager.get_hookcallers(plugin) or ()]
    if not own or not set(own) <= set(known):
        has = ", ".join(own) or "none; are they marked with @hookimpl?"
        raise PluginError(
            f"the hooks of shardcore are {', '.join(known)}, those of the plug-in {has}"
        )


def choose(wanted: str, offers: Offers[StrategyEntry]) -> tuple[StrategyEntry, dict[str, str]]:
    """Chooses a strategy, with the reasons against the others by name.

    Raises:
        StrategyError: If there is no such strategy, or it cannot be used here.
    """
    reasons = {name: _why_unavailable(entry) for name, entry in offers.entries.items()}
    if wanted == "auto":
        chosen = most_preferred(
            [entry for entry in offers.entries.values() if not reasons[entry.name]]
        )
    else:
        chosen = offers.get(wanted, "auto")
        if reasons[wanted]:
            raise StrategyError(
                f"Strategy {wanted!r} cannot be used here: {reasons[wanted]}", name=wanted
            )
    behind = f"{chosen.name!r} {'has precedence' if wanted == 'auto' else 'was asked for'}."
    unpreferred = "chosen only by name." if wanted == "auto" else behind
    others = {
        name: reasons[name] or (unpreferred if entry.preference is None else behind)
        for name, entry in offers.entries.items()
        if entry is not chosen
    }
    return chosen, {**others, **offers.broken}


def with_options(entry: StrategyEntry, options: dict[str, object]) -> StrategyEntry:
    """Binds `options` to the opening of a strategy.

    Raises:
        StrategyError: If it has no option of such a name, or the option takes other values: those
            of its annotation, where that is a `Literal` or a `Mapping[str, ...]` to a class.
    """
    parameters = inspect.signature(entry.open).parameters.values()
    known = {
        parameter.name: parameter.annotation
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    STRATEGIES.check_options(entry.name, options, known)
    for name, value in options.items():
        expected = _expected_values(name, value, known[name])
        if expected:
            raise StrategyError(
                f"Strategy {entry.name!r} takes {expected}, got {value!r}.",
                name=name,
                expected=expected,
                got=repr(value),
            )
    return attrs.evolve(entry, open=partial(entry.open, **options)) if options else entry


def _expected_values(name: str, value: object, annotation: object) -> str | None:
    """Describes the values that option `name` takes; None if `value` is one, or any may be."""
    origin, of = get_origin(annotation), get_args(annotation)
    if origin is Literal and value not in of:
        return " or ".join(f"{name}={choice!r}" for choice in of)
    if origin is Mapping and not (
        isinstance(value, Mapping)
        and all(
            isinstance(key, of[0]) and isinstance(member, of[1]) for key, member in value.items()
        )
    ):
        return f"{name}={{{of[0].__name__}: {of[1].__name__}(...)}}"
    return None


def most_preferred(usable: list[StrategyEntry]) -> StrategyEntry:
    """Chooses the entry with the highest preference; those without are chosen by name only."""
    ranked = [(entry.preference, entry) for entry in usable if entry.preference is not None]
    return max(ranked, key=lambda pair: pair[0])[1]


def _why_unavailable(entry: StrategyEntry) -> str | None:
    if entry.package == OURS:
        return entry.why_unavailable()
    try:
        reason = plugin_calls.call(entry.why_unavailable, "its why_unavailable()", entry.package)
        if reason is not None and not isinstance(reason, str):
            raise PluginError(
                f"its why_unavailable() gave {reason!r}, expected None or a reason", name=reason
            )
    except PluginError as error:
        logger.warning("package %r, strategy %r: %s", entry.package, entry.name, error)
        return str(error)
    return reason
