"""Damages the files of a checkpoint at random, and loads it: an error with a name, or its values.

KERAS_BACKEND=torch python -m tests.faults.files.checkpoint_files     1000 cases
"""

import hashlib
import json
import random
import resource
import shutil
import signal
import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import layers

import shardcore
from shardcore.domain.errors import CheckpointError
from shardcore.testing import run_ranks
from tests.faults.files import forgeries
from tests.faults.kinds import Kind, grouped

SECONDS = 20  # for one load
MEBIBYTES = 64  # that all loads may add to the memory of the process
GOOD = ("error", "right")

VALUES = [
    *(None, True, -1, 0, 1, 2, 3, 2**40, 2**70, 0.5, float("nan"), "", "..", "/etc/passwd"),
    *("float64", "x" * 1000, [], {}, [0], [[0]], [2**40, 2**40], {"a": 1}),
]


def distribute(shape):
    shardcore.install()
    mesh = keras.distribution.DeviceMesh(shape, ("data", "model"))
    rules = keras.distribution.LayoutMap(mesh)
    rules[".*hidden.*kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )


def build():
    keras.utils.set_random_seed(3)
    hidden, digits = layers.Dense(8, name="hidden"), layers.Dense(4, name="digits")
    model = keras.Sequential([keras.Input((6,)), hidden, layers.Dropout(0.5), digits])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def values_of(model):
    return [np.asarray(v.numpy()) for v in (*model.variables, *model.optimizer.variables)]


def save(rank, directory):
    distribute((1, 2))
    model = build()
    model.train_on_batch(np.ones((4, 6), "float32"), np.ones((4, 4), "float32"))
    shardcore.save_checkpoint(directory, model, step=1)
    return values_of(model)


def file_of(folder, rng):
    """Returns a file of the checkpoint, and what it is."""
    file = rng.choice(sorted(folder.iterdir()))
    return file, "the index" if file.suffix == ".json" else "a shard"


def flip_bits(folder, rng):
    file, what = file_of(folder, rng)
    content = bytearray(file.read_bytes())
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return f"flipped bits of {what}"


def cut(folder, rng):
    file, what = file_of(folder, rng)
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content))])
    return f"{what} is cut"


def remove(folder, rng):
    file, what = file_of(folder, rng)
    file.unlink()
    return f"{what} is missing"


def append(folder, rng):
    file, what = file_of(folder, rng)
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.randint(1, 64)))
    return f"bytes behind {what}"


def overwrite(folder, rng):
    file, what = file_of(folder, rng)
    content = bytearray(file.read_bytes())
    size = rng.randint(1, 64)
    at = rng.randrange(max(len(content) - size, 1))
    content[at : at + size] = rng.randbytes(size)
    file.write_bytes(content)
    return f"other bytes in {what}"


def exchange(folder, rng):
    one, other = rng.sample(sorted(folder.iterdir()), 2)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    has_index = "index.json" in (one.name, other.name)
    return "the index and a shard exchanged" if has_index else "two shards exchanged"


def edit(folder, rng):
    """Changes a value of the index; of two times once, its checksum too, as a forger would."""
    file = folder / "index.json"
    index = json.loads(file.read_text())
    at, names = index["content"], []
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = rng.choice(keys)
        names += [key] if isinstance(key, str) else []
        if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.2:
            break
        at = at[key]
    if rng.random() < 0.2:
        del at[key]
    elif rng.random() < 0.2:
        at[key] = at[rng.choice(keys)]
    else:
        at[key] = rng.choice(VALUES)
    is_signed = rng.random() < 0.5
    if is_signed:
        text = json.dumps(index["content"], sort_keys=True, separators=(",", ":"))
        index["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    file.write_text(json.dumps(index))
    if not is_signed:
        return "a changed index with the checksum of before"
    return f"another value of {forgeries.field_of(names)}, with a checksum that fits"


DAMAGES = (flip_bits, cut, remove, append, overwrite, exchange, edit, edit, edit)


def outcome(folder, model, saved):
    """Returns what a load of a damaged checkpoint did: "error", "right", or what is wrong."""
    names = [v.path for v in (*model.variables, *model.optimizer.variables)]
    before = values_of(model)
    signal.alarm(SECONDS)
    try:
        shardcore.load_checkpoint(folder, model)
    except CheckpointError as error:
        if not any(name in str(error) for name in (folder.name, "index", *names)):
            return f"an error without a name: {error}"
        same = all(map(np.array_equal, before, values_of(model)))
        return "error" if same else f"the model has changed, in spite of {error}"
    except Exception as error:  # noqa: BLE001 - it is reported
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    return "right" if all(map(np.array_equal, values_of(model), saved)) else "a wrong load"


def load_all(rank, folder, saved, cases, seed):
    """Loads `cases` damaged copies; returns their kinds and outcomes, and the MiB they added."""
    distribute((1, 1))
    rng, found = random.Random(seed), []
    model = build()
    shardcore.load_checkpoint(folder, model)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    copy = folder.parent / "damaged" / folder.name
    for _ in range(cases):
        shutil.copytree(folder, copy)
        kind = rng.choice(DAMAGES)(copy, rng)
        for variable in model.variables:
            if "seed" not in variable.path:
                variable.assign(variable.numpy() + 1)
        found.append((kind, outcome(copy, model, saved)))
        shutil.rmtree(copy.parent)
    return found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) / 1024


def run(cases, seed):
    """Returns the kinds and outcomes of so many cases, and the memory that they added in MiB."""
    with tempfile.TemporaryDirectory() as directory:
        saved = run_ranks(save, 2, Path(directory))[0]
        folder = Path(directory) / "step-00000001"
        return run_ranks(load_all, 1, folder, saved, cases, seed, timeout=60 + cases)[0]


def kinds(cases, seed=1):
    """Yields the kinds of damage, and the memory of all loads."""
    found, added = run(cases, seed)
    yield from grouped(found, GOOD)
    problem = None if added <= MEBIBYTES else f"{added:.0f} MiB were added"
    yield Kind.once("memory of all these loads", problem)


if __name__ == "__main__":
    for kind in kinds(1000):
        print(kind)
