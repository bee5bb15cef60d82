"""`shardcore checkpoint`: without a model and without ranks, and what Keras reads of it."""

import json
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest
import safetensors.numpy
from keras import layers

import shardcore
from shardcore import cli
from shardcore.testing import run_ranks

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 6)).astype("float32"), RNG.integers(0, 4, 8)


def build():
    keras.utils.set_random_seed(3)
    inner = keras.Sequential([layers.Dense(8, "relu", name="hidden"), layers.BatchNormalization()])
    model = keras.Sequential(
        [keras.Input((6,)), inner, layers.Dense(4, dtype="mixed_bfloat16"), layers.Dropout(0.5)]
    )
    model.layers[1].bias.assign([1.0, 2.0, 3.0, 4.0])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def distribute():
    shardcore.install()
    mesh = keras.distribution.DeviceMesh((1, 2), ("data", "model"))
    rules = keras.distribution.LayoutMap(mesh)
    rules[".*hidden.*kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )


def values_of(model):
    return [np.asarray(v.numpy()) for v in (*model.weights, *model.optimizer.variables)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")

    def save(rank):
        distribute()
        model = build()
        model.train_on_batch(X, Y)
        shardcore.save_checkpoint(directory, model, step=1, state={"epoch": 0})
        model.save_weights(directory / "keras.weights.h5")
        model.save_weights(directory / "keras.weights.json", max_shard_size=1e-6)
        return values_of(model)

    return directory, run_ranks(save, 2)[0]


def equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["a.weights.h5", "a.weights.json"])
def test_keras_reads_a_converted_checkpoint(saved, tmp_path, capsys, name):
    directory, values = saved
    words = ["checkpoint", "convert", str(directory), str(tmp_path / name)]
    assert cli.main([*words, "--max-shard-size", "1e-6"]) == 0
    assert "left out" in capsys.readouterr().out

    def load(rank):
        model = build()
        model.optimizer.build(model.trainable_variables)
        model.load_weights(tmp_path / name)
        return values_of(model)

    equal(run_ranks(load, 1)[0], values)
    assert (len(list(tmp_path.iterdir())) > 2) == name.endswith("json")


@pytest.mark.parametrize("name", ["keras.weights.h5", "keras.weights.json"])
def test_a_mesh_loads_converted_weights_of_keras(saved, tmp_path, name):
    directory, values = saved
    target = tmp_path / "step-00000000"
    assert cli.main(["checkpoint", "convert", str(directory / name), str(target)]) == 0

    def load(rank):
        distribute()
        model = build()
        model.optimizer.build(model.trainable_variables)
        report = shardcore.load_checkpoint(target, model, strict=False)
        return values_of(model), report.problems, report.unused

    for found, problems, unused in run_ranks(load, 2):
        equal(found, values)
        assert all("seed" in problem for problem in problems)
        assert all("loss" in each or "metric" in each for each in unused), unused


def test_safetensors_and_back(saved, tmp_path):
    directory, _ = saved
    one = str(tmp_path / "one.safetensors")
    assert cli.main(["checkpoint", "convert", str(directory), one]) == 0
    words = ["checkpoint", "convert", one, str(tmp_path / "parts")]
    assert cli.main([*words, "--max-shard-size", "1e-6"]) == 0
    whole = safetensors.numpy.load_file(tmp_path / "one.safetensors")
    places = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert places["weight_map"].keys() == whole.keys()
    for name, file in places["weight_map"].items():
        part = safetensors.numpy.load_file(tmp_path / "parts" / file)
        np.testing.assert_array_equal(part[name], whole[name])
    again = str(tmp_path / "again.safetensors")
    assert cli.main(["checkpoint", "convert", str(tmp_path / "parts"), again]) == 0
    assert safetensors.numpy.load_file(again).keys() == whole.keys()


def test_inspect_shows_variables_and_verify_finds_a_flipped_bit(saved, tmp_path, capsys):
    directory, _ = saved
    assert cli.main(["checkpoint", "inspect", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert "step 1, saved on mesh (data=1, model=2)" in " ".join(shown.split())
    assert "hidden/kernel" in shown
    assert cli.main(["checkpoint", "inspect", "--json", str(directory)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["user_state"] == {"epoch": 0}
    assert found["versions"]["keras"] == keras.__version__
    assert cli.main(["checkpoint", "verify", str(directory)]) == 0
    assert "2 files, all as written" in capsys.readouterr().out

    copy = shutil.copytree(directory / "step-00000001", tmp_path / "step-00000001")
    content = bytearray((copy / "rank-00000.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "rank-00000.safetensors").write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        cli.main(["checkpoint", "verify", str(copy)])
    assert ended.value.code == 1
    assert "checksum differs" in capsys.readouterr().err


def test_convert_refuses_a_flipped_bit_and_a_shard_of_another_step(saved, tmp_path, capsys):
    directory, _ = saved

    def save(rank):
        distribute()
        model = build()
        model.train_on_batch(X, Y)
        model.train_on_batch(X, Y)
        shardcore.save_checkpoint(tmp_path, model, step=1, state={"epoch": 0})

    run_ranks(save, 2)
    name = "rank-00001.safetensors"
    flipped, mixed = (
        shutil.copytree(directory / "step-00000001", tmp_path / each / "step-00000001")
        for each in ("flipped", "mixed")
    )
    content = bytearray((flipped / name).read_bytes())
    content[-1] ^= 1
    (flipped / name).write_bytes(content)
    shutil.copy(tmp_path / "step-00000001" / name, mixed / name)
    assert (mixed / name).stat().st_size == (flipped / name).stat().st_size
    for source in (flipped, mixed):
        for target in ("a.weights.h5", "a.safetensors", "parts", "step-00000003"):
            with pytest.raises(SystemExit) as ended:
                cli.main(["checkpoint", "convert", str(source), str(tmp_path / "to" / target)])
            assert ended.value.code == 1
            assert f"{name}' was changed after it was written" in capsys.readouterr().err
    assert list((tmp_path / "to").iterdir()) == []


def test_a_reader_that_has_enough_is_no_error(saved):
    command = f"{sys.executable} -m shardcore checkpoint inspect {saved[0]}"
    piped = f"{command} | true; echo $PIPESTATUS"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("nothing", "a.weights.h5", "cannot be converted"),
        ("step-00000001", "a.pickle", "is no target"),
        ("step-00000001", "keras.weights.h5", "exists"),
    ],
)
def test_what_cannot_be_converted_is_an_error(saved, capsys, source, target, message):
    directory, _ = saved
    with pytest.raises(SystemExit) as ended:
        cli.main(["checkpoint", "convert", str(directory / source), str(directory / target)])
    assert ended.value.code == 1
    assert message in capsys.readouterr().err


def test_weights_that_keras_saves_in_another_form_are_refused(tmp_path, capsys):
    def save(rank):
        shardcore.install()
        model = build()
        model.layers[1].enable_lora(2)
        shardcore.save_checkpoint(tmp_path, model, step=1)

    run_ranks(save, 1)
    with pytest.raises(SystemExit):
        cli.main(["checkpoint", "convert", str(tmp_path), str(tmp_path / "a.weights.h5")])
    assert "in another form" in capsys.readouterr().err
