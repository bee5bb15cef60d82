"""An error of the file system on one rank is the error of all, with its file and its rank."""

import resource

import keras
import numpy as np
import pytest
from keras import callbacks, layers

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.programs import distribute

X = np.ones((8, 64), "float32")
NO_FOLDER = "/proc/none"  # in which not even root makes a file


def built():
    distribute((1, 2), {".*hidden/kernel": (None, "model")})
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64, name="hidden")], name="net")
    model.compile("adam", "mse")
    return model


def error_of(call):
    with pytest.raises(OSError) as raised:  # noqa: PT011 - the kind is what is tested
        call()
    return str(raised.value), " ".join(raised.value.__notes__)


@pytest.mark.parametrize("kind", [callbacks.BackupAndRestore, callbacks.ModelCheckpoint])
def test_a_folder_that_cannot_be_made_is_the_error_of_all_ranks(kind):
    def program(rank):
        model, path = built(), f"{NO_FOLDER}/a.weights.h5"
        fit = lambda: model.fit(X, X, verbose=0, callbacks=[kind(path)])  # noqa: E731
        found = error_of(fit)
        model.fit(X, X, verbose=0)  # the ranks are together
        return found

    for error, notes in run_ranks(program, 2, timeout=60):
        assert NO_FOLDER in error
        assert f"Rank 0 could not write the file of {kind.__name__} '{NO_FOLDER}" in notes


WRITES = {
    "save": lambda model, folder: model.save(folder / "a.keras"),
    "checkpoint": lambda model, folder: shardcore.save_checkpoint(folder, model, step=1),
    "log": lambda model, folder: model.fit(
        X, X, epochs=9, verbose=0, callbacks=[callbacks.CSVLogger(folder / "a.csv")]
    ),
}
# The rank, of which the size of a file is limited, and the bytes that it may have.
LIMITED = {"save": (0, 1000), "checkpoint": (1, 4096), "log": (0, 40)}


@pytest.mark.parametrize("name", WRITES)
def test_a_file_that_is_too_large_on_one_rank_is_named_with_the_rank(name, tmp_path):
    limited, size = LIMITED[name]

    def program(rank):
        model = built()
        model.fit(X, X, verbose=0)
        if rank == limited:
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
        return error_of(lambda: WRITES[name](model, tmp_path))

    # The limit is not for a file by which the ranks meet.
    for error, notes in run_ranks(program, 2, init=False, timeout=60):
        assert "File too large" in error
        assert str(tmp_path) in error
        assert f"Rank {limited} could not" in notes
