"""Builds the plugin manager, chooses a strategy, and wires it into Keras."""

import importlib.util
import logging
import os
import sys
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any

import attrs
import pluggy

from shardcore import builtin_plugins
from shardcore.domain.errors import EnvironmentProblem, StrategyError
from shardcore.ports import hookspecs
from shardcore.ports.strategy import StrategyEntry
from shardcore.reporting.logs import configure

logger = logging.getLogger("shardcore.install")

# The releases that the seam table and the torch compat module are written for.
KNOWN = {"keras": "3.15", "torch": "2.13"}


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


@attrs.frozen(eq=False)
class Installation:
    """What `install()` put in place.

    Args:
        entry: The strategy that was chosen.
        passed_over: Why the others were not, by name.
        binding: The `shardcore.binding.binding.Binding`.
        processes: The job of this process.
    """

    entry: StrategyEntry
    passed_over: dict[str, str]
    binding: Any
    processes: Any


_installed: Installation | None = None


def installation() -> Installation:
    """What is installed.

    Raises:
        EnvironmentProblem: If nothing is.
    """
    if _installed is None:
        raise EnvironmentProblem("shardcore is not installed: call shardcore.install() first.")
    return _installed


def is_installed() -> bool:
    """Whether shardcore is in Keras now."""
    return _installed is not None


def install(strategy: str) -> Installation:
    """Choose a strategy and bind it into Keras; the same one again changes nothing."""
    global _installed  # noqa: PLW0603 - one Keras per process
    configure(_rank)
    if _installed is not None:
        return _again(_installed, strategy)
    choose_backend()
    check_versions()
    entry, passed_over = choose(strategy, entries())
    from shardcore.adapters.processes import TorchProcesses
    from shardcore.binding.binding import Binding

    processes = TorchProcesses()
    binding = Binding(entry, processes)
    binding.put()
    _installed = Installation(entry, passed_over, binding, processes)
    logger.info("strategy %r taken%s", entry.name, _because(passed_over))
    return _installed


def uninstall() -> None:
    """Take everything out of Keras; without an installation do nothing."""
    global _installed  # noqa: PLW0603 - one Keras per process
    if _installed is not None:
        _installed.binding.remove()
        _installed = None


def _again(installed: Installation, strategy: str) -> Installation:
    if strategy in ("auto", installed.entry.name):
        return installed
    raise StrategyError(
        f"shardcore is installed with strategy {installed.entry.name!r}, so it cannot be installed "
        f"with {strategy!r}: call shardcore.uninstall() first. Variables that are laid out stay "
        "with the strategy that made them, so build the model anew after it."
    )


def _because(passed_over: dict[str, str]) -> str:
    reasons = "; ".join(f"not {name!r}: {reason}" for name, reason in passed_over.items())
    return f" ({reasons})" if reasons else ""


def _rank() -> int:
    # The job is joined later than the first lines are logged; its launcher knows the rank.
    if _installed is not None and _installed.processes.world_size > 1:
        return int(_installed.processes.rank)
    return int(os.environ.get("RANK", os.environ.get("KERAS_DISTRIBUTION_PROCESS_ID", "0")) or 0)


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
    others = {name: _why_not(entry, reasons[name], chosen) for name, entry in entries.items()}
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


def _why_not(entry: StrategyEntry, reason: str | None, chosen: StrategyEntry) -> str:
    if reason:
        return reason
    if entry.preference is None:
        return "taken only when it is asked for by name."
    return f"{chosen.name!r} goes before it."


def choose_backend() -> None:
    """See to it that Keras runs on torch.

    Raises:
        EnvironmentProblem: If another backend is chosen or loaded.
    """
    backend = _loaded_backend() or os.environ.get("KERAS_BACKEND")
    if backend is None:
        os.environ["KERAS_BACKEND"] = "torch"
        logger.info("KERAS_BACKEND was not set: Keras will run on torch")
    elif backend != "torch":
        raise EnvironmentProblem(
            f"shardcore is for Keras on PyTorch, but the backend is {backend!r}: set "
            'KERAS_BACKEND=torch in the environment (or os.environ["KERAS_BACKEND"] = "torch") '
            "before Keras is imported."
        )


def _loaded_backend() -> str | None:
    keras = sys.modules.get("keras")
    return None if keras is None else str(keras.backend.backend())


def check_versions() -> None:
    """Raise an EnvironmentProblem unless Keras and torch are there, in versions we know."""
    for package, known in KNOWN.items():
        found = package_version(package)
        if found is None or importlib.util.find_spec(package) is None:
            raise EnvironmentProblem(
                f"shardcore needs {package} {known}, and it is not installed: "
                "pip install 'shardcore[torch]'."
            )
        if found.split("+")[0].split(".")[:2] != known.split("."):
            raise EnvironmentProblem(
                f"shardcore knows {package} {known}, but {found} is installed, whose internal "
                f"names may have moved: pip install '{package}=={known}.*', or look for a newer "
                "shardcore."
            )


def package_version(package: str) -> str | None:
    """The version of an installed package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
