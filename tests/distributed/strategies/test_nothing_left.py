"""After `uninstall()` a process is as it was before `install()`, and a real `fit` in between."""

import os

import pytest

from shardcore.adapters.ranks.job.forked_ranks import free_port
from tests import warm
from tests.checks.tree import ROOT
from tests.distributed.programs import STRATEGY

PROGRAM = """
import sys
strategy, is_loaded = sys.argv[1], sys.argv[2] == "loaded"
import os
from tests import left_behind
if is_loaded:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras, torch, torch.distributed.tensor.parallel, torch._inductor.compile_fx

def train(mesh):
    import shardcore
    if mesh:
        shardcore.install(strategy)
    import keras, numpy as np
    if mesh:
        devices = keras.distribution.DeviceMesh(mesh, ("data", "model"))
        rules = keras.distribution.LayoutMap(devices)
        rules[".*dense.*kernel"] = (None, "data")
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
        )
    model = keras.Sequential([
        keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dropout(0.5),
        keras.layers.Lambda(sort),
    ])
    model.compile("adam", "mse", metrics=["mae"])
    x = np.ones((10, 4), "float32")
    model.fit(x, np.ones((10, 8), "float32"), batch_size=4, epochs=3, verbose=0)
    if mesh:
        assert shardcore.verify(model).ok
        shardcore.explain(model, (x[:4], np.ones((4, 8), "float32")))
        model.save_weights(f"{os.environ['FOLDER']}/w.weights.h5")
        # As a large compiled step on a CPU of AMD would: it takes long to compile one.
        shardcore.bootstrap.installation().binding.capture._executors.onednn.product()
        shardcore.uninstall()

def sort(x):  # an operator that no rule shards
    import torch
    return torch.sort(x, dim=0).values

ranks = int(os.environ.get("KERAS_DISTRIBUTION_NUM_PROCESSES", "1"))
before = left_behind.of_process()
if is_loaded:
    train(None)  # what torch and Keras load and make by themselves
    left_behind.load_all()
    before = left_behind.of_process() | left_behind.of_libraries() | left_behind.of_globals()
for _ in range(2):
    train((ranks, 1))
    left_behind.collect()
    after = left_behind.of_process() | left_behind.of_libraries() | left_behind.of_globals()
    found = left_behind.differences(before, after)
    assert not found.keys() - set(sys.argv[3].split(",")), found
print("as before")
"""


def run(ranks, *arguments, folder):
    """Both streams of each rank."""
    environment = {name: each for name, each in os.environ.items() if "KERAS" not in name}
    environment |= {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"}
    environment["FOLDER"] = str(folder)
    address = f"127.0.0.1:{free_port()}"
    processes = []
    for rank in range(ranks):
        job = {
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": address,
            "KERAS_DISTRIBUTION_NUM_PROCESSES": str(ranks),
            "KERAS_DISTRIBUTION_PROCESS_ID": str(rank),
        }
        words, variables = ["-c", PROGRAM, STRATEGY, *arguments], job if ranks > 1 else {}
        start = warm.Program if arguments[0] == "loaded" else warm.new_interpreter
        processes.append(start(words, environment | variables))
    return [each.communicate(timeout=240) for each in processes]


# torch joins a job once: the process group stays, and is ended with the interpreter.
OF_A_JOB = (
    "functions at exit,shardcore.adapters.ranks.failure.store._RANKS,"
    "shardcore.adapters.ranks.job.signed_store._SECRETS"
)
# Nothing is loaded before: torch registers operators and functions as it is imported.
OF_IMPORTS = "operators,functions at exit"


@pytest.mark.parametrize(
    ("ranks", "loaded", "apart"), [(1, "", OF_IMPORTS), (1, "loaded", ""), (2, "loaded", OF_A_JOB)]
)
def test_a_process_is_as_before(ranks, loaded, apart, tmp_path):
    for out, errors in run(ranks, loaded, apart, folder=tmp_path):
        assert out.endswith("as before\n"), errors
