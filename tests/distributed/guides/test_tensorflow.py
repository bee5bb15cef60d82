"""`tf.data` and TensorBoard, for which Keras on torch uses TensorFlow. Skipped without it.

Run with tensorflow-cpu 2.20, tensorboard 2.20, onnx 1.23, onnxscript 0.7 and openvino 2026.4.
"""

import logging
import os
import resource
import tempfile

import keras
import numpy as np
import pytest

import shardcore
from shardcore.domain.errors import RankMismatchError
from shardcore.testing import run_ranks
from tests.distributed.capture.steps import messages
from tests.distributed.data.batches import EXTRA, RULES, X, Y, model, numbers
from tests.distributed.files.test_export import RULES as EXPORTED_RULES
from tests.distributed.files.test_export import X as EXPORTED_X
from tests.distributed.files.test_export import trained
from tests.distributed.programs import assert_close, at_place, distribute

tf = pytest.importorskip("tensorflow")

# Of Keras, TensorFlow and the exporters; none is ours.
pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def batched(*arrays, size=4, known=True):
    """The batches of arrays; by a filter, of unknown number."""
    batches = tf.data.Dataset.from_tensor_slices(arrays).batch(size)
    return batches if known else batches.filter(lambda *_: True)


def test_datasets_of_known_and_unknown_length_that_every_process_reads_whole():
    def program(rank, mesh):
        if mesh:
            distribute(mesh, RULES)
        values = {}
        for known in (True, False):
            fitted, several = model(), model("dict")
            data = {"validation_data": batched(X, Y, known=known), "epochs": 2, "verbose": 0}
            found = numbers(fitted.fit(batched(X, Y, known=known), **data), fitted)
            values |= {f"{known} {name}": value for name, value in found.items()}
            inputs = batched({"x": X, "extra": EXTRA}, Y, known=known)
            values[f"{known} evaluated"] = several.evaluate(inputs, verbose=0)
            values[f"{known} predicted"] = several.predict(inputs.map(lambda x, _: (x,)), verbose=0)
        classes = np.int32(Y[:, :1] > 0)
        fitted = model()
        fitted.fit(batched(X, classes), class_weight={0: 0.5, 1: 2.0}, verbose=0)
        return values | {"of weighted classes": fitted.get_weights()[0]}

    (reference,) = run_ranks(program, 1, None)
    assert_close(run_ranks(program, 2, (2, 1)), reference)


def test_datasets_of_the_rows_of_each_process():
    def program(rank, mesh, known):
        parts = ([0, 1, 2, 3], [7, 8, 9, 10]), ([4, 5, 6], [11, 12, 13])  # two batches of seven
        rows, size = [*range(14)], 7
        if mesh:
            distribute(mesh, RULES, auto_shard_dataset=False)
            mine = parts[at_place(mesh, rank)[0]]
            rows, size = mine[0] + mine[1], len(mine[0])
        fitted = model()
        data = batched(X[rows], Y[rows], size=size, known=known)
        values = numbers(fitted.fit(data, epochs=2, verbose=0), fitted)
        values["evaluated"] = fitted.evaluate(data, verbose=0)
        return values | {"predicted": fitted.predict(data.map(lambda x, _: x), verbose=0)}

    for mesh, known in [((2, 1), True), ((2, 2), False)]:
        (reference,) = run_ranks(program, 1, None, known)
        assert_close(run_ranks(program, mesh[0] * mesh[1], mesh, known), reference)


def test_a_dataset_whose_last_batch_differs_is_named():
    def program(rank):
        distribute((2, 1), RULES)
        rows = 14 - rank
        with pytest.raises(RankMismatchError, match=r"batch 3: rank 1 has .*\(1, 5\) float32"):
            model().fit(batched(X[:rows], Y[:rows]), verbose=0)

    run_ranks(program, 2)


WORDS = np.random.default_rng(0).integers(0, 16, size=(14, 6))
WAYS = {
    "epochs": {"histogram_freq": 1, "write_images": True, "embeddings_freq": 1},
    "steps": {"update_freq": 2, "write_steps_per_second": True},
}


class LogsToTensorBoard(keras.Sequential):
    """A model whose step writes a scalar for TensorBoard."""

    def train_step(self, data):
        logs = super().train_step(data)
        tf.summary.scalar("extra", keras.ops.convert_to_numpy(logs["loss"]))
        return logs


def write_summaries(rank, mesh, folder):
    if mesh:
        distribute(mesh, {"embeddings": (None, "model"), "hidden/kernel": (None, "model")})
    for way, options in WAYS.items():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(16, 4, name="embedding"), keras.layers.Flatten()]
        layers += [keras.layers.Dense(4, name="hidden"), keras.layers.Dense(2, name="head")]
        kind = keras.Sequential if way == "epochs" else LogsToTensorBoard
        built = kind([keras.Input((6,), dtype="int32"), *layers], name="model")
        built.compile(keras.optimizers.SGD(0.1), "mse")
        written = keras.callbacks.TensorBoard(folder / way, **options)
        data = {"validation_data": (WORDS, Y), "batch_size": 4, "epochs": 2, "verbose": 0}
        built.fit(WORDS, Y, callbacks=[written], **data)


@pytest.mark.parametrize("update_freq", ["epoch", "batch"])
def test_a_full_disk_is_one_error_on_all_ranks_for_tensorboard(update_freq, tmp_path):
    def log(rank):
        distribute((1, 2), {".*kernel": (None, "model")})
        layers = [keras.layers.Dense(128) for _ in range(40)]
        model = keras.Sequential([keras.Input((128,)), *layers])
        model.compile("sgd", "mse")
        options = {"histogram_freq": 1, "write_images": True, "update_freq": update_freq}
        written = keras.callbacks.TensorBoard(tmp_path, **options)
        if rank == 0:  # more than the ranks exchange by a file, less than the images
            resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, resource.RLIM_INFINITY))
        with pytest.raises(tf.errors.OpError, match="File too large") as error:
            model.fit(np.ones((32, 128)), np.ones((32, 128)), 8, 20, verbose=0, callbacks=[written])
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        return str(error.value)

    on_rank_0, on_rank_1 = run_ranks(log, 2, timeout=200)
    assert on_rank_0 == on_rank_1


def files(folder):
    """The names of the files below `folder`, those of events without time and process."""
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    events = "events.out.tfevents"
    names = [events if path.name.startswith(events) else path.name for path in found]
    return sorted(str(path.parent / name) for path, name in zip(found, names, strict=True))


def summaries(folder):
    """All that TensorBoard would show: by file and tag the values of all steps."""
    found = {}
    for path in sorted(folder.rglob("events.*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                name = f"{path.parent.relative_to(folder)} {value.tag} {event.step}"
                found[name] = tf.make_ndarray(value.tensor)
    return found


def test_tensorboard_files_come_from_one_rank_and_are_those_of_one_device(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    meshes = {None: 1, (1, 2): 2, (2, 1): 2}
    for mesh, ranks in meshes.items():
        run_ranks(write_summaries, ranks, mesh, tmp_path / str(mesh))
    expected = summaries(tmp_path / "None")
    tags = ("kernel/histogram", "kernel/image", "keras", "batch_loss", "extra", "per_second")
    assert all(any(each in name for name in expected) for each in tags)
    for mesh in [(1, 2), (2, 1)]:
        folder = tmp_path / str(mesh)
        assert files(folder) == files(tmp_path / "None")
        found = summaries(folder)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            if value.dtype.kind == "f" and "per_second" not in name:
                np.testing.assert_allclose(value, expected[name], atol=1e-4, err_msg=name)
    assert os.listdir(tmp_path / "scratch") == []


def export(rank, mesh, folder, form):
    if mesh:
        distribute(mesh, EXPORTED_RULES)
    exported = trained()
    exported.export(str(folder / f"{mesh}.{form}"), format={"xml": "openvino"}.get(form, form))


def run_onnx(path):
    from onnx.reference import ReferenceEvaluator

    session = ReferenceEvaluator(str(path))
    return session.run(None, {session.input_names[0]: EXPORTED_X[:1]})[0]


def run_xml(path):
    import openvino

    return openvino.compile_model(str(path), "CPU")(EXPORTED_X[:1])[0]


@pytest.mark.parametrize(
    ("form", "run", "kept"), [("onnx", run_onnx, ["onnx"]), ("xml", run_xml, ["bin", "xml"])]
)
def test_an_artefact_for_other_runtimes_is_that_of_one_device(form, run, kept, tmp_path):
    for package in {"onnx": ["onnx", "onnxscript"], "xml": ["openvino"]}[form]:
        pytest.importorskip(package)
    run_ranks(export, 1, None, tmp_path, form)
    run_ranks(export, 2, (1, 2), tmp_path, form)
    names = [f"{mesh}.{ending}" for mesh in ["(1, 2)", "None"] for ending in kept]
    assert sorted(os.listdir(tmp_path)) == names
    outputs = [run(tmp_path / f"{mesh}.{form}") for mesh in [None, (1, 2)]]
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-6)


def test_a_saved_model_which_keras_cannot_write_on_torch_fails_on_every_rank(tmp_path):
    def program(rank):
        distribute((1, 2), EXPORTED_RULES)
        with pytest.raises(Exception, match=r"dynamic_shapes|torch_xla"):
            export(rank, (1, 2), tmp_path, "tf_saved_model")

    run_ranks(program, 2)


PREPROCESSING = {
    "flip": keras.layers.RandomFlip,
    "translation": lambda: keras.layers.RandomTranslation(0.1, 0.1),
    "contrast": lambda: keras.layers.RandomContrast(0.2),
    "rotation": lambda: keras.layers.RandomRotation(0.1),
    "resizing": lambda: keras.layers.Resizing(6, 6),
    "normalization": lambda: keras.layers.Normalization(mean=0.0, variance=1.0),
}


@pytest.mark.parametrize("name", PREPROCESSING)
def test_steps_with_preprocessing_are_captured_beside_tensorflow(name):
    def program(rank):
        shardcore.install("single")
        said = messages(logging.DEBUG)
        keras.utils.set_random_seed(0)
        layers = [PREPROCESSING[name](), keras.layers.Flatten(), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((8, 8, 3)), *layers])
        model.compile("sgd", "mse")
        for _ in range(4):
            model.train_on_batch(np.ones((2, 8, 8, 3), "float32"), np.ones((2, 2), "float32"))
        return said

    (said,) = run_ranks(program, 1)
    assert ["is captured" in text for text in said if "train_step" in text] == [True], said
