"""One user script: alone by `python`, on ranks by `torchrun`; by `shardcore verify`, `explain`."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

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


def run(*words, ranks=None, cwd):
    """Runs `python WORDS`, or the same under torchrun; gives the finished process."""
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"] if ranks else []
    # Python's own option is torchrun's --module.
    words = ["--module" if ranks and word == "-m" else word for word in words]
    env = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "SHARDCORE_LOG")}
    return subprocess.run(
        [sys.executable, *launcher, *words],
        cwd=cwd,
        env=env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def results(done):
    assert done.returncode == 0, done.stderr
    # Not line by line: what another rank prints may stand before it.
    return sorted(json.loads(found) for found in re.findall(r"RESULT (\[.*?\]\])", done.stdout))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def test_the_same_script_runs_alone_and_under_torchrun(folder):
    alone = run("script.py", cwd=folder)
    together = run("script.py", ranks=2, cwd=folder)
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
    done = run("-m", "shardcore", "verify", "script.py:build", "--json", ranks=2, cwd=folder)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one document: rank 0's
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
    simulated = run(*words, "--ranks", "2", cwd=folder)
    real = run(*words, ranks=2, cwd=folder)
    assert (simulated.returncode, real.returncode) == (0, 0), simulated.stderr + real.stderr
    assert json.loads(simulated.stdout) == json.loads(real.stdout)
    calls = json.loads(real.stdout)["calls"]
    assert calls == {"all_reduce": 1}


def test_status_on_two_ranks_is_that_of_the_job(folder):
    done = run("-m", "shardcore", "status", "--json", ranks=2, cwd=folder)
    status = json.loads(done.stdout)
    assert (status["devices"], status["world_size"]) == (["cpu:0", "cpu:1"], 2)


def test_wrong_usage_on_ranks_ends_all_of_them(folder):
    done = run("-m", "shardcore", "verify", "script.py:no_model", ranks=2, cwd=folder)
    assert done.returncode != 0
    assert "no_model() of" in done.stderr
    assert "returned int, expected a keras.Model" in done.stderr
    assert "exitcode  : 2" in done.stderr
