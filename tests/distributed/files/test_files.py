"""Files: what a mesh saves is what one device would have saved, and one rank writes it."""

import contextlib
import os
import time

import keras
import numpy as np
import pytest

import shardcore
from shardcore.testing import RankFailed, run_ranks

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 6)).astype("float32")
Y = RNG.integers(0, 4, 20)
MESHES = [(1, 2), (2, 1), (2, 2)]


def distribute(shape):
    shardcore.install("dtensor")
    mesh = keras.distribution.DeviceMesh(shape, ("data", "model"))
    rules = keras.distribution.LayoutMap(mesh)
    rules[".*hidden/kernel"] = (None, "model")
    rules[".*digits/kernel"] = ("model", None)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )


def build():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, "relu", name="hidden"),
            keras.layers.Dense(4, name="digits"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=False)
    return model


def losses(model, epochs):
    return model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0).history["loss"]


def reference(folder):
    """One device: trains, saves, trains on."""
    model = build()
    losses(model, 2)
    model.save(folder / "one.keras")
    return model.get_weights(), losses(model, 1)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """The file of one device, its weights, and the losses of the epoch that follows."""
    folder = tmp_path_factory.mktemp("one")
    return folder / "one.keras", *run_ranks(lambda _: reference(folder), 1)[0]


@pytest.mark.parametrize("shape", MESHES)
def test_plain_keras_reads_what_a_mesh_saved_and_another_mesh_resumes(shape, one_device, tmp_path):
    saved_by_one, weights, further = one_device

    def save(rank):
        distribute(shape)
        model = build()
        losses(model, 2)
        model.save(tmp_path / "mesh.keras")
        model.save_weights(tmp_path / "mesh.weights.h5")
        return sorted(os.listdir(tmp_path))

    for names in run_ranks(save, shape[0] * shape[1]):
        assert names == ["mesh.keras", "mesh.weights.h5"]

    def read_plain(rank):
        model = keras.saving.load_model(tmp_path / "mesh.keras")
        other = build()
        other.optimizer.build(other.trainable_variables)  # Keras reads its state too
        other.load_weights(tmp_path / "mesh.weights.h5")
        return model.get_weights(), losses(model, 1), other.get_weights()

    whole, resumed, only_weights = run_ranks(read_plain, 1)[0]
    for mine, theirs, third in zip(whole, weights, only_weights, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
        np.testing.assert_array_equal(mine, third)
    np.testing.assert_allclose(resumed, further, rtol=1e-5)

    other = {(1, 2): (2, 1), (2, 1): (1, 2), (2, 2): (1, 4)}[shape]

    def resume(rank):
        distribute(other)
        resumed = []
        for path in (tmp_path / "mesh.keras", saved_by_one):
            model = keras.saving.load_model(path)
            assert shardcore.verify(model).ok
            resumed.append(losses(model, 1))
        sharded = model.get_layer("hidden").kernel
        return resumed, model.get_weights()[0].shape, str(sharded)

    for resumed, shape_of_kernel, shown in run_ranks(resume, other[0] * other[1]):
        np.testing.assert_allclose(resumed, [further, further], rtol=1e-5)
        assert shape_of_kernel == (6, 8)
        assert other[1] == 1 or "(None, 'model')" in shown


@pytest.mark.parametrize("name", ["own.keras", "own.weights.h5"])
def test_each_rank_may_save_to_its_own_path(tmp_path, name):
    def save(rank):
        distribute((1, 3))
        model = build()
        losses(model, 1)
        path = tmp_path / f"host{rank // 2}" / name  # of which ranks 0 and 1 share one
        path.parent.mkdir(exist_ok=True)
        model.save(path) if name.endswith("keras") else model.save_weights(path)
        return model.get_weights(), sorted(os.listdir(path.parent))

    def load(rank):
        read = []
        for host in range(2):
            path = tmp_path / f"host{host}" / name
            model = keras.saving.load_model(path) if name.endswith("keras") else build()
            if not name.endswith("keras"):
                model.optimizer.build(model.trainable_variables)
                model.load_weights(path)
            read.append(model.get_weights())
        return read

    saved = run_ranks(save, 3)
    assert [files for _, files in saved] == [[name]] * 3
    for weights in run_ranks(load, 1)[0]:
        for found, expected in zip(weights, saved[0][0], strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["one.keras", "one.weights.h5", "one.h5"])
def test_one_rank_writes_one_file_that_ranks_name_by_a_link_and_without(tmp_path, name):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    def save(rank):
        distribute((1, 2))
        model = build()
        path = tmp_path / ("real", "link")[rank] / name
        model.save_weights(path) if "weights" in name else model.save(path)
        return model.get_weights()

    first, _ = run_ranks(save, 2)
    assert [path.name for path in (tmp_path / "real").iterdir()] == [name]

    def load(_rank):
        path = tmp_path / "real" / name
        if "weights" not in name:
            return keras.models.load_model(path, compile=False).get_weights()
        model = build()
        model.load_weights(path)
        return model.get_weights()

    for found, expected in zip(run_ranks(load, 1)[0], first, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_replicated_model_that_one_rank_cannot_save_fails_where_its_path_is(tmp_path):
    def save(rank):
        shardcore.install("dtensor")
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        path = tmp_path / "one.keras" if rank == 0 else "/proc/none/one.keras"
        try:
            build().save(path)
        except OSError as error:
            return error.__notes__[-1]

    first, second = run_ranks(save, 2)
    assert first is None
    assert second.endswith("/one.keras': every rank that does raises this error.")


def test_one_rank_writes_what_ranks_save_to_one_path_after_clear_session(tmp_path):
    path, written = tmp_path / "own.weights.h5", []

    class Slow(keras.layers.Dense):
        def save_own_variables(self, store):
            written.append(self.name)
            time.sleep(0.3)  # the other rank saves meanwhile
            super().save_own_variables(store)

    def save(rank):
        distribute((1, 2))
        keras.random.uniform((2,))
        keras.utils.clear_session()
        model = keras.Sequential([keras.Input((6,)), Slow(4)])
        model.save_weights(path)
        before = model.get_weights()
        model.load_weights(path)  # of the rank that wrote
        return before, written, model.get_weights()

    results = run_ranks(save, 2)
    assert sorted(len(written) for _, written, _ in results) == [0, 1]
    expected = next(before for before, written, _ in results if written)
    for _, _, found in results:
        np.testing.assert_array_equal(found[0], expected[0])
    assert os.listdir(tmp_path) == ["own.weights.h5"]


def test_saving_on_one_rank_only_is_an_error_within_the_timeout(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDCORE_TIMEOUT", "2")

    def save(rank):
        distribute((1, 2))
        model = build()
        if rank == 0:
            model.save(tmp_path / "alone.keras")
        else:
            time.sleep(30)

    began = time.monotonic()
    match = r"rank 1, which did not come within 2 seconds.*every rank"
    with pytest.raises(RankFailed, match=match):
        run_ranks(save, 2)
    assert time.monotonic() - began < 20
    assert os.listdir(tmp_path) == []


def test_a_failed_write_leaves_the_old_file(tmp_path):
    def save(rank):
        distribute((1, 2))
        model = build()
        model.save_weights(tmp_path / "kept.weights.h5")
        before = (tmp_path / "kept.weights.h5").read_bytes()
        if rank == 0:
            model.layers[0].save_own_variables = lambda store: 1 / 0
        try:
            model.save_weights(tmp_path / "kept.weights.h5")
        except ZeroDivisionError:
            assert (tmp_path / "kept.weights.h5").read_bytes() == before
            assert os.listdir(tmp_path) == ["kept.weights.h5"]
            raise

    with pytest.raises(RankFailed, match="ZeroDivisionError"):
        run_ranks(save, 2)


def test_a_rank_that_ignores_the_error_of_another_rank_raises_it_later(tmp_path):
    def save(rank):
        distribute((1, 2))
        model = build()
        hidden = model.layers[0]

        def goes_on(store):
            with contextlib.suppress(Exception):
                keras.ops.convert_to_numpy(hidden.kernel)

        hidden.save_own_variables = [lambda store: 1 / 0, goes_on][rank]
        with pytest.raises(ZeroDivisionError):
            model.save_weights(tmp_path / "kept.weights.h5")

    run_ranks(save, 2, timeout=20)
