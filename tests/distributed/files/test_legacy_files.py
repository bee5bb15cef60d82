"""Models in HDF5, `model.save("m.h5")`: one rank writes, and plain Keras reads it."""

import os
import signal

import h5py
import keras
import numpy as np
import pytest

from shardcore.testing import RankFailed, run_ranks
from tests.distributed.files import test_files_after_a_crash
from tests.distributed.files.test_files_after_a_crash import X, distribute


def build():
    model = test_files_after_a_crash.build()
    # Keras cannot read the name of a loss from such a file.
    model.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError())
    return model


def values_of(model):
    return [np.asarray(v.numpy()) for v in model.weights]


def trained(ranks):
    distribute(ranks)
    model = build()
    model.fit(X, X[:, :1], batch_size=8, epochs=1, verbose=0)
    return model


@pytest.mark.parametrize("name", ["m.h5", "new/folder/m.hdf5"])
def test_plain_keras_and_a_mesh_read_what_one_rank_writes(name, tmp_path):
    path = tmp_path / name

    def save(rank):
        model = trained(2)
        if rank == 1:
            opened = os.open
            os.open = lambda file, *args, **kwargs: refuse(opened, file, *args, **kwargs)
        model.save(path)
        moments = [np.asarray(v.numpy()) for v in model.optimizer.variables]
        return values_of(model), moments, os.listdir(path.parent)

    def refuse(opened, file, *args, **kwargs):
        assert not str(file).startswith(str(tmp_path)), "a second rank opens the file"
        return opened(file, *args, **kwargs)

    def load(rank, ranks):
        if ranks:
            distribute(ranks)
        model = keras.models.load_model(path)
        return values_of(model)

    expected, moments, names = run_ranks(save, 2)[0]
    assert names == [path.name]
    with h5py.File(path) as file:
        group = file["optimizer_weights"]
        stored = [group[name][()] for name in group.attrs["weight_names"]]
    for one, other in zip(stored, moments, strict=True):
        np.testing.assert_array_equal(one, other)
    for ranks in (0, 1, 2):
        for found in run_ranks(load, max(ranks, 1), ranks):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)


def test_model_checkpoint_writes_it_with_a_path_for_each_rank(tmp_path):
    def save(rank):
        distribute(2)
        model = build()
        saver = keras.callbacks.ModelCheckpoint(str(tmp_path / f"host-{rank}" / "{epoch}.h5"))
        model.fit(X, X[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[saver])
        return sorted(os.listdir(tmp_path / f"host-{rank}"))

    assert run_ranks(save, 2) == [["1.h5", "2.h5"]] * 2
    keras.models.load_model(tmp_path / "host-1" / "2.h5")


def test_weights_alone_in_a_path_that_ends_in_h5_are_refused_as_by_keras(tmp_path):
    def save(rank):
        distribute(2)
        with pytest.raises(ValueError, match=r"must end in `.weights.h5`"):
            build().save_weights(tmp_path / "x.h5")

    run_ranks(save, 2)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_in_the_save_leaves_the_old_file(ranks, tmp_path):
    path = tmp_path / "m.h5"

    def killed(rank):
        model = trained(ranks)
        model.save(path)
        before = values_of(model)
        (tmp_path / f"{rank}.npy").write_bytes(before[0].tobytes())
        model.set_weights([each + 1 for each in model.get_weights()])
        if rank == 0:
            os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        model.save(path)

    with pytest.raises(RankFailed):
        run_ranks(killed, ranks)

    def load(rank):
        return values_of(keras.models.load_model(path))

    found = run_ranks(load, 1)[0]
    assert found[0].tobytes() == (tmp_path / "0.npy").read_bytes()
