"""Rank 0 alone writes a file, and what it cannot write is an error on every rank."""

import os

import keras
import numpy as np
import pytest

from shardcore import bootstrap
from shardcore.binding.checkpoints.files.callbacks import OneWriter
from shardcore.testing import run_ranks
from tests.distributed.programs import distribute
from tests.distributed.regression import X


class Unsaved(keras.layers.Layer):
    """A layer whose state cannot be written by the rank that should write, or by any."""

    fails_on = ()

    def call(self, x):
        return x

    def save_own_variables(self, store):
        if (
            keras.distribution.distribution()
            and bootstrap.installation().processes.rank in self.fails_on
        ):
            raise self.error


class LocalError(Exception):
    """No other process can make one of its message alone."""

    def __init__(self, code, message):
        super().__init__(message)


def test_a_file_that_cannot_be_written_is_one_error_on_every_rank_and_all_go_on(tmp_path):
    """Rank 0 fails before, among and after the collectives; rank 1 among them."""

    def program(rank):
        distribute((1, 2), {".*kernel": (None, "model"), "last/kernel": ("model", None)})
        x = keras.Input((4,))
        broken = Unsaved()
        h = broken(keras.layers.Dense(8)(x))
        model = keras.Model(x, keras.layers.Dense(1, name="last")(keras.layers.Dense(8)(h)))
        model.compile("sgd", "mse")
        caught = []

        def attempt(path, error, fails_on=(), save=model.save):
            broken.fails_on, broken.error = fails_on, error
            with pytest.raises(Exception) as raised:  # noqa: PT011 - it is compared
                save(path)
            notes = getattr(raised.value, "__notes__", [])
            caught.append((type(raised.value).__name__, str(raised.value), notes))
            return model.predict(X, verbose=0)

        missing = tmp_path / "no" / "such"
        attempt(missing / "a.keras", None)
        attempt(missing / "a.weights.h5", None, save=model.save_weights)
        attempt(tmp_path / "b.keras", OSError(28, "No space left"), (0,))
        attempt(tmp_path / "b.weights.h5", OSError(28, "No space"), (1,), save=model.save_weights)
        attempt(tmp_path / "c.keras", KeyError("both"), (0, 1))
        (tmp_path / "taken.keras").mkdir(exist_ok=True)
        attempt(tmp_path / "taken.keras", None)
        predicted = attempt(tmp_path / "d.keras", LocalError(1, "a message"), (0,))
        broken.fails_on = ()
        model.save(tmp_path / "good.keras")
        return caught, predicted, sorted(os.listdir(tmp_path))

    (caught, predicted, names), (others, also, _) = run_ranks(program, 2)
    # h5py puts its own words around the errno: the kind is what a program catches.
    assert [name for name, _, _ in caught] == [
        "FileNotFoundError", "FileNotFoundError", "OSError", "OSError", "KeyError",
        "IsADirectoryError", "ShardcoreError",
    ]  # fmt: skip
    assert [each[:2] for each in caught] == [each[:2] for each in others]
    assert "Rank 0 could not save" in caught[0][2][0]
    np.testing.assert_array_equal(predicted, also)
    assert names == ["good.keras", "taken.keras"]


def test_only_rank_0_writes_to_a_file_in_any_mode(tmp_path):
    def program(rank):
        distribute((2, 1))
        path = str(tmp_path / "log")
        files = OneWriter(bootstrap.installation().binding.sessions, keras.src.utils.file_utils)
        processes = bootstrap.installation().processes
        read = []
        for mode, content in [("w", "old"), ("r+", "NEW"), ("a", "+"), ("r+b", b"n"), ("a+", "+")]:
            before = processes.gather(None)
            with files.File(path, mode) as file:
                if "r" in mode:
                    read.append(file.read())
                    file.seek(0)
                    processes.gather(before)  # all have read
                file.write(content if rank == 0 else content * 5)
            processes.gather(None)
        with files.File(path, "r") as file:
            return [*read, file.read()]

    assert run_ranks(program, 2) == [["old", b"NEW+", "nEW++"]] * 2
