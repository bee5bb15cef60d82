"""The functions of `shardcore` for sharded checkpoints.

The examples have the model of `shardcore.api`, and a directory with a checkpoint of it::

    import tempfile

    directory = tempfile.mkdtemp()
    path = shardcore.save_checkpoint(directory, model, step=12, state={"epoch": 3})
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardcore import bootstrap
from shardcore.bootstrap import environment
from shardcore.domain.checkpoints.contents import Loaded
from shardcore.ports.types import KerasModel

if TYPE_CHECKING:
    from shardcore.binding.checkpoints.checkpoints import Checkpoints


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: KerasModel,
    step: int,
    *,
    state: Mapping[str, object] = MappingProxyType({}),
    keep: int | None = None,
) -> Path:
    """Saves a checkpoint: each rank writes its shards. All ranks call it together.

    It has the variables of the model, its optimizer and its metrics, the seeds, and the states of
    torch's generators. A crash meanwhile leaves the checkpoints that are complete.

    Args:
        directory: The directory of all checkpoints, on a file system that all hosts share. The
            checkpoint is a folder in it: `step-00000012`.
        model: The built Keras model.
        step: The number of training steps so far. A checkpoint of the same step is replaced.
        state: What you need besides, such as `{"epoch": 3}`: None, bools, numbers, texts, and
            lists and dicts of them, equal on all ranks.
        keep: How many complete checkpoints to keep, the newest ones; None for all.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: If the model is not built, or the state is no JSON.
        RankMismatchError: If a rank does not call it, or with other arguments.
        CallProblem: If it is called on another thread than the main one.

    Example:
        >>> shardcore.save_checkpoint(directory, model, step=12, state={"epoch": 3}).name
        'step-00000012'
    """
    saving = checkpoints().save(directory, model, step, {"user": dict(state)}, keep)
    return saving.finish()


def load_checkpoint(
    path: str | os.PathLike[str], model: KerasModel, *, strict: bool = True
) -> Loaded:
    """Loads a checkpoint into a model, on any mesh and in any layout. All ranks call it together.

    The checksums are compared first, of each file by one rank. Then each rank reads the bytes of
    its shards, and no others.

    Args:
        path: The folder of a checkpoint; or the directory of several, for the newest complete one.
        model: The built Keras model. Its layers have the names that they had, but for numbers
            that Keras gave them.
        strict: Whether every variable has to fit. If not, those that fit are loaded, and the
            report names the others. A model without an optimizer leaves out that of the
            checkpoint in both cases.

    Returns:
        The report: step, state, the variables that were loaded, and those that were not.

    Raises:
        CheckpointError: If the checkpoint is missing, incomplete or damaged, or does not fit. The
            model has not changed then.

    Example:
        >>> report = shardcore.load_checkpoint(directory, model)
        >>> report.step, report.state, report.problems
        (12, {'epoch': 3}, ())
    """
    return checkpoints().load(path, model, strict).report


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """Finds the newest complete checkpoint of a directory. All ranks call it together.

    It logs a warning for each one that is not complete.

    Args:
        directory: The directory that was given to `save_checkpoint`.

    Returns:
        The folder of the checkpoint, None if there is none.

    Example:
        >>> shardcore.latest_checkpoint(directory).name
        'step-00000012'
    """
    return checkpoints().latest(directory)


def checkpoints() -> "Checkpoints":
    """Builds what saves and loads checkpoints in folders, for the installation.

    Raises:
        EnvironmentProblem: If shardcore is not installed.
    """
    sessions = bootstrap.installation().binding.sessions
    from shardcore.adapters.checkpoints.store import FolderStore
    from shardcore.binding.checkpoints.checkpoints import Checkpoints

    versions = {name: str(version) for name, version in environment.versions().items()}
    return Checkpoints(sessions, FolderStore(), versions)
