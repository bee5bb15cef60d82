"""One user script: alone by `python`, on ranks by torchrun; by `shardcore verify`, `explain`."""

import json
import os
import re

import numpy as np
import pytest

from tests import warm

SCRIPT = """
import shardcore
shardcore.install()

import json
import keras
import numpy as np

def build():
    keras.utils.set_random_seed(0)
    ranks = keras.distribution.get_device_count()
    mesh = keras.distribution.DeviceMesh((1, ranks), ("data", "model"))
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["up/kernel"] = (None, "model")
    layout_map["up/bias"] = ("model",)
    layout_map["down/kernel"] = ("model", None)
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout_map))
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "relu", name="up")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3, name="down")(hidden))
    model.compile("adam", "mse")
    return model

def batch():
    return np.random.normal(size=(20, 6)), np.random.normal(size=(20, 3))

def no_model():
    return 42

if __name__ == "__main__":
    model = build()
    x, y = np.random.normal(size=(20, 6)), np.random.normal(size=(20, 3))
    history = model.fit(x, y, batch_size=8, epochs=3)
    rank = keras.distribution.distribution()._process_id
    # One write, which no other rank's can part, where Python does not buffer either.
    print("RESULT " + json.dumps([rank, model.layers[1].kernel.shape, history.history["loss"]]))
"""


def environment():
    chosen = ("KERAS_BACKEND", "SHARDCORE_LOG")
    inherited = {name: value for name, value in os.environ.items() if name not in chosen}
    return inherited | {"OMP_NUM_THREADS": "1"}


def run_on_ranks(*words, cwd):
    """Runs `python WORDS` on two ranks; gives their exit codes, and what each printed."""
    ranks = warm.start_ranks(words, 2, environment(), cwd)
    printed = [rank.communicate(180) for rank in ranks]
    outs, errors = zip(*printed, strict=True)
    return [rank.returncode for rank in ranks], outs, errors


def results(done):
    assert done.returncode == 0, done.stderr
    # Not line by line: what another rank prints may stand before it.
    return sorted(json.loads(found) for found in re.findall(r"RESULT (\[.*?\]\])", done.stdout))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def test_the_same_script_runs_alone_and_under_torchrun(folder):
    alone = warm.run(["script.py"], environment(), folder)
    words = ["--nproc_per_node=2", "script.py"]
    together = warm.run_torchrun(words, environment(), folder)
    ((_, shape, expected),) = results(alone)
    on_ranks = results(together)
    assert [rank for rank, _, _ in on_ranks] == [0, 1], together.stdout
    assert shape == [6, 8]
    for _, global_shape, losses in on_ranks:
        assert global_shape == [6, 8]
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
    # One rank shows progress, and logs. The strategy that is usual is no news.
    assert together.stdout.count("Epoch 1/3") == alone.stdout.count("Epoch 1/3") == 1
    said = [line for line in together.stderr.splitlines() if line.startswith("[shardcore")]
    assert all(line.startswith("[shardcore rank 0]") for line in said)
    assert not any("strategy" in line for line in said)
    assert "ignored in" not in together.stderr  # no scope is closed after torch is gone


def test_verify_on_two_ranks_prints_one_report(folder):
    words = ("-m", "shardcore", "verify", "script.py:build", "--json")
    codes, (document, other), errors = run_on_ranks(*words, cwd=folder)
    assert (codes, other) == ([0, 0], ""), errors
    report = json.loads(document)
    assert (report["ok"], report["rank"], report["mesh"]) == (True, 0, "(data=1, model=2)")
    assert {v["path"]: v["local_shape"] for v in report["variables"][:4]} == {
        "up/kernel": [6, 4],
        "up/bias": [4],
        "down/kernel": [4, 3],
        "down/bias": [3],
    }
    assert [v["rule"] for v in report["variables"][:2]] == ["up/kernel", "up/bias"]


def test_explain_says_the_same_of_simulated_and_of_real_ranks(folder):
    words = ("-m", "shardcore", "explain", "script.py", "--json")
    simulated = warm.run([*words, "--ranks", "2"], environment(), folder)
    codes, (real, other), errors = run_on_ranks(*words, cwd=folder)
    assert (simulated.returncode, codes, other) == (0, [0, 0], ""), (simulated.stderr, errors)
    assert json.loads(simulated.stdout) == json.loads(real)
    assert json.loads(real)["calls"] == {"all_reduce": 1}


def test_status_on_two_ranks_is_that_of_the_job(folder):
    _, (document, other), _ = run_on_ranks("-m", "shardcore", "status", "--json", cwd=folder)
    assert other == ""
    status = json.loads(document)
    assert (status["devices"], status["world_size"]) == (["cpu:0", "cpu:1"], 2)


def test_wrong_usage_on_ranks_ends_all_of_them(folder):
    words = ("-m", "shardcore", "verify", "script.py:no_model")
    codes, _, errors = run_on_ranks(*words, cwd=folder)
    assert codes == [2, 2]
    assert "no_model() of" in errors[0]
    assert "returned int, expected a keras.Model" in errors[0]
