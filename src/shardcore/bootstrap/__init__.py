"""The composition root: chooses a strategy and wires it into Keras."""

import logging
import os
from contextlib import ExitStack
from typing import Any

import attrs

from shardcore.bootstrap import environment, plugin_rules, plugins, self_check
from shardcore.domain.errors import EnvironmentProblem, StrategyError
from shardcore.domain.ranks.job import launched_job
from shardcore.ports.strategy import StrategyEntry
from shardcore.reporting.errors import show_user_frames
from shardcore.reporting.logs import configure, log_of
from shardcore.reporting.status import Status

logger = log_of("install")


@attrs.frozen(eq=False)
class Installation:
    """The objects that `install()` made, and how to take them back.

    Args:
        entry: The strategy that was chosen.
        options: The options of the strategy.
        passed_over: The reasons against the other strategies, by name.
        plugins: The strategies and policies that packages offer.
        binding: The `shardcore.binding.install.Binding`.
        processes: The job of this process.
        undo: Restores what is not of Keras: the log, `KERAS_BACKEND`, torch, the watch of other
            ranks.
    """

    entry: StrategyEntry
    options: dict[str, Any]
    passed_over: dict[str, str]
    plugins: plugins.Plugins
    binding: Any
    processes: Any
    undo: ExitStack


_installed: Installation | None = None


def installation() -> Installation:
    """Looks up the installation of this process.

    Raises:
        EnvironmentProblem: If shardcore is not installed.
    """
    if _installed is None:
        raise EnvironmentProblem("shardcore is not installed: call shardcore.install() first.")
    return _installed


def is_installed() -> bool:
    """Tells whether shardcore is installed into Keras."""
    return _installed is not None


def load_plugins() -> plugins.Plugins:
    """Loads the strategies and policies that packages offer, with one warning of each problem."""
    if _installed is not None:
        return _installed.plugins
    loaded = plugins.load()
    loaded.log()
    return loaded


def install(strategy: str, options: dict[str, object]) -> Installation:
    """Chooses a strategy and binds it into Keras; the same one again changes nothing."""
    global _installed  # noqa: PLW0603 - one Keras per process
    if _installed is not None:
        return _check_again(_installed, strategy, options)
    with ExitStack() as undo:
        undo.callback(configure(rank))
        undo.callback(show_user_frames())
        if environment.choose_backend():
            # A Keras that is loaded stays on torch.
            undo.callback(os.environ.pop, "KERAS_BACKEND", None)
        newer = environment.check_versions()
        if newer:
            self_check.check(newer)
        loaded = load_plugins()
        entry, passed_over = plugins.choose(strategy, loaded.strategies)
        entry = plugins.with_options(entry, options)
        from shardcore.adapters.capture.running.program import TraceCapture
        from shardcore.adapters.engine.update_on_device import update_on_device
        from shardcore.adapters.ranks.processes import TorchProcesses
        from shardcore.adapters.slicing import slice_calls

        with environment.keras_imported():
            from shardcore.adapters.engine.host_access import replace_functions
            from shardcore.binding.install import Binding

        passed_over |= plugin_rules.declare(loaded.rules, declare_rule)
        processes = TorchProcesses()
        processes.take_device()
        capture = TraceCapture(slice_calls)
        undo.callback(capture.close)
        undo.callback(replace_functions())
        binding = Binding(entry, processes, capture, update_on_device)
        binding.put()
        undo.callback(processes.unwatch)
        _installed = Installation(
            entry, options, passed_over, loaded, binding, processes, undo.pop_all()
        )
    if newer:
        logger.warning("%s The self-check found nothing that does not fit.", " ".join(newer))
    # "auto" reports only that it cannot have the strategy that it prefers.
    best = plugins.most_preferred(list(loaded.strategies.entries.values()))
    level = logging.INFO if strategy == "auto" and entry.name != best.name else logging.DEBUG
    logger.log(level, "strategy %r chosen%s", entry.name, _reasons_text(passed_over))
    return _installed


def uninstall() -> None:
    """Restores every Keras name; does nothing without an installation."""
    global _installed  # noqa: PLW0603 - one Keras per process
    if _installed is not None:
        _installed.binding.remove()
        _installed.undo.close()
        _installed = None


def declare_rule(operator: object, text: str) -> None:
    """Declares the sharding rule of an operator; where ranks share tensors, all declare it."""
    from shardcore.adapters.engine import dispatch

    def compare(call: str) -> None:
        if _installed is not None:
            _installed.binding.sessions.declare_rule(call)

    dispatch.declare_rule(operator, text, compare)


def simulate(ranks: int) -> None:
    """Makes this process rank 0 of simulated ranks, before it joins a job."""
    from shardcore.adapters.ranks.job import process_group

    process_group.simulate(ranks)


def status() -> Status:
    """Describes the strategy, the mesh, the devices and the versions in use."""
    versions = environment.versions()
    if _installed is None:
        return Status(False, None, {}, None, None, (), 0, 1, versions)
    session = _installed.binding.sessions.current()
    return Status(
        installed=True,
        strategy=_installed.entry.name,
        passed_over=dict(_installed.passed_over),
        mesh_shape=session.mesh.shape if session else None,
        axis_names=session.mesh.axis_names if session else None,
        devices=tuple(_installed.binding.library.joined_devices()),
        rank=_installed.processes.rank,
        world_size=_installed.processes.world_size,
        versions=versions,
        hosts=_installed.processes.hosts,
    )


def _check_again(
    installed: Installation, strategy: str, options: dict[str, object]
) -> Installation:
    if strategy in ("auto", installed.entry.name) and options in ({}, installed.options):
        return installed
    raise StrategyError(
        f"shardcore is installed with strategy {installed.entry.name!r}"
        f"{_options_text(installed.options)}, so it cannot be installed with {strategy!r}"
        f"{_options_text(options)}: call shardcore.uninstall() first. Variables that are laid out "
        "stay with the strategy that made them, so build the model again after it.",
        name=installed.entry.name,
    )


def _options_text(options: dict[str, object]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())


def _reasons_text(passed_over: dict[str, str]) -> str:
    reasons = "; ".join(f"not {name!r}: {reason}" for name, reason in passed_over.items())
    return f" ({reasons})" if reasons else ""


def rank() -> int:
    """Looks up the rank of this process, also before it joins the job: its launcher knows it."""
    if _installed is not None and _installed.processes.world_size > 1:
        return int(_installed.processes.rank)
    job = launched_job(os.environ)
    return 0 if job is None else job.rank
