"""Ways to save a model: by a call, or by a callback of a fit."""

import re

import attrs
import keras
import numpy as np

import shardcore

BACKUP_FILES = (r"latest\.weights\.h5", r"training_metadata\.json")
STEPS = 4  # in an epoch


@attrs.frozen
class Way:
    """A way to save.

    Args:
        names: Patterns of the names that are left when a save is complete.
        every: For a callback of a fit, the steps from save to save; None if no fit runs.
        unfinished: How many saves may be under way while the next one begins.
    """

    names: tuple[str, ...]
    every: int | None = None
    unfinished: int = 0

    def is_left(self, names):
        """Returns whether the names are those of a complete save and no others."""
        return len(names) == len(self.names) and all(map(re.fullmatch, self.names, names))


# What saves, and into which file, or how.
WAYS = {
    "model.keras": Way((r"model\.keras",)),
    "model.h5": Way((r"model\.h5",)),
    "model.weights.h5": Way((r"model\.weights\.h5",)),
    "ModelCheckpoint model.keras": Way((r"model\.keras",), STEPS),
    "ModelCheckpoint model.h5": Way((r"model\.h5",), STEPS),
    "ModelCheckpoint model.weights.h5": Way((r"model\.weights\.h5",), STEPS),
    "BackupAndRestore": Way(BACKUP_FILES, STEPS),
    "BackupAndRestore of every 3 steps": Way(BACKUP_FILES, 3),
    "ShardedCheckpoint": Way((r"step-\d{8}",), 3),
    "ShardedCheckpoint, asynchronous": Way((r"step-\d{8}",), 3, unfinished=1),
    "checkpoint": Way(("step-01000000",)),
    "checkpoint of the same step": Way(("step-00000007",)),
}
X = np.zeros((STEPS, 64), "float32")


def distribute(ranks):
    shardcore.install("single" if ranks == 1 else "dtensor")
    mesh = keras.distribution.DeviceMesh((1, ranks), ("data", "model"))
    rules = keras.distribution.LayoutMap(mesh)
    rules[".*kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )


def build():
    assert keras.distribution.distribution() is not None
    model = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(64) for _ in range(4))])
    # Keras cannot read the name of a loss from a file of HDF5.
    model.compile(keras.optimizers.SGD(0.0), keras.losses.MeanSquaredError())
    return model


def save(way, folder, model, number):
    """Saves by a call, or by a callback of `fit` that no fit resumes."""
    if way == "checkpoint":
        shardcore.save_checkpoint(folder, model, step=number, keep=1)
    elif way == "checkpoint of the same step":
        shardcore.save_checkpoint(folder, model, step=7, keep=1)
    elif way.startswith("ModelCheckpoint"):
        model.fit(X, X, batch_size=1, verbose=0, callbacks=[saver(way, folder)])
    elif way.endswith(".weights.h5"):
        model.save_weights(folder / way)
    else:
        model.save(folder / way)


def saver(way, folder):
    """Returns the callback that saves."""
    kind, _, rest = way.partition(" ")
    if kind == "ModelCheckpoint":
        only_weights = rest.endswith(".weights.h5")
        return keras.callbacks.ModelCheckpoint(folder / rest, save_weights_only=only_weights)
    if kind == "BackupAndRestore":
        frequency = WAYS[way].every if rest else "epoch"
        return keras.callbacks.BackupAndRestore(
            folder, save_freq=frequency, delete_checkpoint=False
        )
    return shardcore.ShardedCheckpoint(
        folder, every_steps=WAYS[way].every, keep=1, asynchronous=bool(rest)
    )


def is_resumed(way):
    """Returns whether a fit goes on where the save was made."""
    return way.startswith(("BackupAndRestore", "ShardedCheckpoint"))


def load(way, folder):
    """Returns a model with what is saved."""
    file = folder / way.removeprefix("ModelCheckpoint ")
    if way.endswith(".keras"):
        return keras.saving.load_model(file)
    if way.endswith("model.h5"):
        model = keras.saving.load_model(file)
        # The optimizer that Keras reads from such a file cannot train the model.
        model.compile(keras.optimizers.SGD(0.0), keras.losses.MeanSquaredError())
        return model
    model = build()
    if way.startswith("checkpoint"):
        shardcore.load_checkpoint(folder, model)
    else:
        model.load_weights(file)
    return model
