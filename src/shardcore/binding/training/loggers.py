"""Callbacks of other packages that log a run: each process would have one, so one rank logs."""

import sys
from collections.abc import Callable
from typing import Any

import attrs
from keras.callbacks import CallbackList

from shardcore.binding.ranks.session import Session
from shardcore.domain.errors import CallProblem


@attrs.frozen
class _Package:
    """A package whose callbacks log a run.

    Args:
        logs: Whether they log one of this process alone, by the module of the package.
        remedy: How one rank logs.
    """

    logs: Callable[[Any], bool]
    remedy: str


def _is_one_of_several(run: Any) -> bool:
    """Tells whether a run of Weights & Biases is disabled, in a group, or shared by the ranks."""
    return bool(run.disabled or run.group or run.settings.mode == "shared")


_PACKAGES = {
    "mlflow": _Package(
        lambda mlflow: True,
        "Give it to rank 0 alone, under `if shardcore.status().rank == 0`; call "
        "mlflow.start_run(), or mlflow.keras.autolog(log_models=False), there too.",
    ),
    "wandb": _Package(
        lambda wandb: wandb.run is not None and not _is_one_of_several(wandb.run),
        'Call wandb.init(mode="disabled") on each rank but rank 0 (shardcore.status().rank). For a '
        'run of each rank: wandb.init(group="...").',
    ),
}


def refuse_several_runs(callbacks: CallbackList, session: Session) -> None:
    """Raises on all ranks if callbacks of one package log a run on more than one of them."""
    everyone = session.processes.gather(_loggers(callbacks), "comparing loggers of fit()")
    for package, known in _PACKAGES.items():
        ranks = [rank for rank, loggers in enumerate(everyone) if package in loggers]
        if len(ranks) > 1:
            raise CallProblem(
                f"{everyone[ranks[0]][package]} would log a separate run on each of ranks "
                f"{', '.join(map(str, ranks))}. {known.remedy}"
            )


def _loggers(callbacks: CallbackList) -> dict[str, str]:
    """Names a callback that logs a run of this process, by its package."""
    names = {
        str(kind.__module__).partition(".")[0]: type(callback).__name__
        for callback in callbacks.callbacks
        for kind in type(callback).__mro__
    }
    return {
        package: names[package]
        for package, known in _PACKAGES.items()
        if package in names and known.logs(sys.modules[package])
    }
