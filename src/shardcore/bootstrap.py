"""Builds the plugin manager, chooses a strategy, and wires it into Keras."""

import importlib.util
import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, version
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
    if _installed is not None:
        return int(_installed.processes.rank)
    return int(os.environ.get("RANK", os.environ.get("KERAS_DISTRIBUTION_PROCESS_ID", "0")) or 0)


def entries() -> dict[str, tuple[StrategyEntry, str]]:
    """Every strategy that a plug-in offers, with the plug-in, by name.

    Raises:
        StrategyError: If a plug-in cannot be loaded or offers a name that is taken; the message
            names the package.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(builtin_plugins, name="shardcore")
    manager.load_setuptools_entrypoints(hookspecs.PROJECT)
    found: dict[str, tuple[StrategyEntry, str]] = {}
    for name, plugin in manager.list_name_plugin():
        for entry in _offers(plugin):
            if entry.name in found:
                raise StrategyError(
                    f"Strategy {entry.name!r} is offered by {found[entry.name][1]!r} and by "
                    f"{name!r}: uninstall one of the two packages."
                )
            found[entry.name] = (entry, name)
    return found


def _offers(plugin: Any) -> list[StrategyEntry]:
    offer = getattr(plugin, "shardcore_strategies", None)
    return [] if offer is None else list(offer())


def choose(
    wanted: str, found: dict[str, tuple[StrategyEntry, str]]
) -> tuple[StrategyEntry, dict[str, str]]:
    """The strategy to take, and why the others are not, by name.

    Raises:
        StrategyError: If there is no such strategy, or it cannot be used here.
    """
    reasons = {name: entry.why_unavailable() for name, (entry, _) in found.items()}
    if wanted == "auto":
        usable = [entry for name, (entry, _) in found.items() if not reasons[name]]
        preferred = {e.preference: e for e in usable if e.preference is not None}
        chosen = preferred[max(preferred)]
    elif wanted not in found:
        raise StrategyError(
            f"No strategy {wanted!r}: there are {', '.join(map(repr, found))}, and 'auto'. A "
            "third party's is offered by its package: is it installed in this environment?"
        )
    elif reasons[wanted]:
        raise StrategyError(f"Strategy {wanted!r} cannot be used here: {reasons[wanted]}")
    else:
        chosen = found[wanted][0]
    others = {name: _why_not(entry, reasons[name], chosen) for name, (entry, _) in found.items()}
    del others[chosen.name]
    return chosen, others


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
