"""Patches: `BackupAndRestore`. The file of the weights has all that a resumed run needs.

Keras writes the epoch into a second file: after a crash between the two, an epoch would be trained
twice.
"""

import json
import os
from pathlib import Path
from typing import Any

import h5py
import keras
from keras.callbacks import BackupAndRestore

from shardcore.binding import keras_private
from shardcore.binding.checkpoints.state import generators, generators_of, set_generators
from shardcore.binding.context.session import Sessions
from shardcore.binding.files.callbacks import together
from shardcore.binding.types import Original
from shardcore.domain.errors import CheckpointError

# The attribute of the file.
NAME = "shardcore"


def save(sessions: Sessions, original: Original, callback: BackupAndRestore) -> None:
    """Replaces `BackupAndRestore._save_model`."""
    if not sessions.are_served():
        original(callback)
        return
    epoch, batch = keras_private.progress_of(callback)
    state = {
        "epoch": epoch,
        "batch": batch,
        "generators": generators(),
        "seeds": [_value(each) for each in _seeds(callback.model)],
        "global_seed": _value(keras_private.global_seed()),
    }
    sessions.beside_weights = {NAME: json.dumps(state)}
    try:
        together(sessions, original, callback)
    finally:
        sessions.beside_weights = {}


def load(sessions: Sessions, original: Original, callback: BackupAndRestore) -> None:
    """Replaces `BackupAndRestore._load_model`."""
    original(callback)
    path = keras_private.weights_path(callback)
    if not sessions.are_served() or keras_private.is_remote(path) or not os.path.exists(path):
        return
    with h5py.File(path) as file:
        text = file.attrs.get(NAME)
    if text is None:  # saved by Keras alone
        return
    try:
        state = json.loads(text)
        epoch, numbers, shared = int(state["epoch"]), state["seeds"], state["global_seed"]
        states = generators_of(state["generators"], Path(path))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} has no training state that can be read ({error!r}): it is damaged. "
            "Remove it to train from the beginning."
        ) from None
    seeds = _seeds(callback.model)
    if len(numbers) != len(seeds):
        raise CheckpointError(
            f"{str(path)!r} has {len(numbers)} random seeds, and model {callback.model.name!r} "
            f"has {len(seeds)}: it was saved by another model."
        )
    if shared is not None:
        keras_private.make_global_seed()
        keras_private.global_seed().assign(shared)
    for seed, value in zip(seeds, numbers, strict=True):
        seed.assign(value)
    set_generators(states)
    keras_private.begin_at(callback.model, epoch)


def _seeds(model: keras.Model) -> list[keras.Variable]:
    return [each for each in model.variables if keras_private.is_seed(each)]


def _value(seed: keras.Variable | None) -> Any:
    return None if seed is None else keras.ops.convert_to_numpy(seed).tolist()
