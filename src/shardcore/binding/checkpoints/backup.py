"""Patches: `BackupAndRestore`. The file of the weights has all that a resumed run needs (ADR 35).

Keras writes the epoch into a second file: after a crash between the two, an epoch would be trained
twice. And it begins the epoch again that it has saved in the middle.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import h5py
import keras
import torch
from keras.callbacks import BackupAndRestore

from shardcore.binding import keras_private
from shardcore.binding.checkpoints.files.callbacks import write_on_all_ranks
from shardcore.binding.checkpoints.files.saving import weights_file_attributes
from shardcore.binding.checkpoints.state import generators, generators_of, set_generators
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks.collective_errors import raise_on_all_ranks
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.trainer_run import DataPosition, SavedPosition
from shardcore.binding.types import Original
from shardcore.domain.errors import CheckpointError

# The attribute of the file.
_NAME = "shardcore"
# The attribute of a callback: a save waits for the end of the epoch.
_WAITS = "_shardcore_save_waits"


@attrs.frozen(eq=False)
class _Backup:
    """The state of training in a file.

    Args:
        epoch: The epoch that runs, or begins.
        steps: How many of its steps are done.
        position: The position in the data; None if the epoch reads it from its beginning.
        metrics: The values of the variables of metrics.
        seeds: The values of the model's seeds.
        global_seed: That of the seed of random functions that get none, if it exists.
        generators: The states of torch's generators.
    """

    epoch: int
    steps: int
    position: SavedPosition | None
    metrics: list[Any]
    seeds: list[Any]
    global_seed: Any
    generators: dict[str, torch.Tensor]

    def __str__(self) -> str:
        return f"epoch {self.epoch}, {self.steps} steps of it"


@replaces(
    "keras.src.callbacks.backup_and_restore:BackupAndRestore._save_model",
    reason="Saves the epoch in a second file, and no state of generators.",
)
def save(sessions: Sessions, original: Original, callback: BackupAndRestore) -> None:
    """Replaces `BackupAndRestore._save_model`. After an epoch's last step it waits for its end."""
    if not sessions.are_served():
        original(callback)
        return
    epoch, last = keras_private.progress_of(callback)
    steps = _steps(sessions, callback)
    if steps and steps >= ((callback.params or {}).get("steps") or steps + 1):
        setattr(callback, _WAITS, True)
        return
    position = _data_position(sessions, steps)
    if position is None:
        steps = 0  # Keras begins the epoch again
    state = {
        "epoch": epoch,
        "batch": last,
        "steps": steps,
        "place": position,
        "metrics": [_value(variable) for variable in callback.model.metrics_variables if steps],
        "generators": generators(),
        "seeds": [_value(seed) for seed in _seeds(callback.model)],
        "global_seed": _value(keras_private.global_seed()),
    }
    with weights_file_attributes({_NAME: json.dumps(state)}):
        write_on_all_ranks(sessions, original, callback)


@replaces(
    "keras.src.callbacks.backup_and_restore:BackupAndRestore.on_epoch_end",
    reason="Of a save after the last step the epoch would be resumed with no step left.",
)
def end_epoch(
    sessions: Sessions, original: Original, callback: BackupAndRestore, epoch: int, logs: object
) -> None:
    """Replaces `BackupAndRestore.on_epoch_end`: a save that has waited for it is made."""
    original(callback, epoch, logs)
    if _WAITS in vars(callback):
        keras_private.save_backup(callback)


@replaces(
    "keras.src.callbacks.backup_and_restore:BackupAndRestore._load_model",
    reason="Reads the epoch from a second file, and no state of generators.",
)
def load(sessions: Sessions, original: Original, callback: BackupAndRestore) -> None:
    """Replaces `BackupAndRestore._load_model`. Ranks that found other backups raise an error."""
    run = sessions.run()
    if run is None or not sessions.are_served():
        original(callback)
        return
    vars(callback).pop(_WAITS, None)
    session, path = sessions.shared(), keras_private.weights_path(callback)
    if session is not None:
        # One rank may have copied the backup before a damaged one to its place.
        session.processes.barrier("the restoring of a backup")
    backup = _read_same_backup(path, session)
    raise_on_all_ranks(partial(original, callback), f"restore {path!r}", session)
    run.position = run.position or DataPosition()
    if backup is not None:
        _restore(backup, callback, path, run.position)
    first = keras_private.first_epoch(callback.model, run.initial_epoch)
    keras_private.set_progress(callback, first, 0 if backup is None else backup.steps)


def _read_same_backup(path: str, session: Session | None) -> _Backup | None:
    """Reads the state in the file, on which all ranks have to agree; None if there is none.

    Raises:
        CheckpointError: If the ranks, whose paths may differ, have different ones.
    """

    def read_here() -> tuple[_Backup | None, str]:
        exists = not keras_private.is_remote(path) and os.path.exists(path)
        backup = _read(path) if exists else None
        return backup, str(backup or ("weights alone" if exists else "nothing"))

    backup, content = raise_on_all_ranks(read_here, f"read {path!r}", session)
    if session is not None:
        everyone = session.processes.gather((content, path))
        if len({what for what, _ in everyone}) > 1:
            texts = (f"rank {rank}: {w} in {p!r}" for rank, (w, p) in enumerate(everyone))
            raise CheckpointError(
                f"Expected the same backup on all ranks, found {'; '.join(texts)}. Copy the one to "
                "go on with to the paths of all ranks, or remove them all to train from the "
                "beginning."
            )
    return backup


def _read(path: str) -> _Backup | None:
    """Parses the state in a file; None if Keras alone has saved it."""
    with h5py.File(path) as file:
        text = file.attrs.get(_NAME)
    if text is None:
        return None
    try:
        state = json.loads(text)
        place = state["place"]
        return _Backup(
            int(state["epoch"]),
            int(state["steps"]),
            None if place is None else SavedPosition.from_json(place),
            list(state["metrics"]),
            list(state["seeds"]),
            state["global_seed"],
            generators_of(state["generators"], Path(path)),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path!r} has no training state that can be read ({error!r}): it is damaged. "
            "Remove it to train from the beginning.",
            name=path,
        ) from None


def _restore(
    backup: _Backup, callback: BackupAndRestore, path: str, position: DataPosition
) -> None:
    """Restores all of a fit but its weights, which Keras has read."""
    model = callback.model
    seeds, metrics = _seeds(model), list(model.metrics_variables) if backup.steps else []
    for what, values, variables in (
        ("random seeds", backup.seeds, seeds),
        ("variables of metrics", backup.metrics, metrics),
    ):
        if len(values) != len(variables):
            raise CheckpointError(
                f"{path!r} has {len(values)} {what}, and model {model.name!r} has "
                f"{len(variables)}: it was saved by another model. Remove it to train from the "
                "beginning.",
                name=path,
            )
    if backup.global_seed is not None:
        keras_private.make_global_seed()
        keras_private.global_seed().assign(backup.global_seed)
    for seed, value in zip(seeds, backup.seeds, strict=True):
        seed.assign(value)
    set_generators(backup.generators)
    keras_private.begin_at(model, backup.epoch)
    position.ahead = backup.position
    position.metrics = list(zip(metrics, backup.metrics, strict=True))


def _steps(sessions: Sessions, callback: BackupAndRestore) -> int:
    """Counts the steps of the epoch that are done; 0 at its end, where the next one begins."""
    run = sessions.run()
    waited = vars(callback).pop(_WAITS, False)
    if run is not None and run.ends_after is not None:
        return run.ends_after
    if waited or keras_private.saves_at_epochs(callback):
        return 0
    return keras_private.progress_of(callback)[1] + 1


def _data_position(sessions: Sessions, steps: int) -> dict[str, object] | None:
    """Encodes the position in the data; None if the next epoch reads it from its beginning."""
    run = sessions.run()
    position = None if run is None else run.position
    if position is None or not (steps or position.goes_on):
        return None
    saved = position.saved(steps)
    return None if saved is None else saved.to_json()


def _seeds(model: keras.Model) -> list[keras.Variable]:
    return [variable for variable in model.variables if keras_private.is_seed(variable)]


def _value(variable: keras.Variable | None) -> Any:
    return None if variable is None else keras.ops.convert_to_numpy(variable).tolist()
