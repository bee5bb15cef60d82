"""The state that new interpreters take over, and what cannot be sent to them."""

import json
import threading
from functools import partial

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.adapters.ranks.launch import new_ranks, process_state
from shardcore.domain.errors import EnvironmentProblem
from shardcore.domain.layouts.mesh import Mesh
from shardcore.testing import run_ranks
from tests import warm

NOTEBOOK = """
import json, os, random, sys
import numpy as np
import shardcore
shardcore.install("manual", weights="gather")
import keras, torch

@keras.saving.register_keras_serializable("mine")
class D(keras.layers.Dense):
    pass

keras.config.set_epsilon(1e-5)
keras.config.set_dtype_policy("mixed_bfloat16")
torch.use_deterministic_algorithms(True, warn_only=True)
sys.path.append("a folder of the notebook")
sys.argv.append("--word")
X = np.linspace(-1, 1, 48, dtype="float32").reshape(8, 6)
weights = torch.linspace(0, 1, 4)

def train(folder, epochs=2):
    unseeded = [random.random(), np.random.rand(), torch.rand(1).item()]
    unseeded.append(float(keras.random.uniform((1,))[0]))
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = keras.Sequential([keras.Input((6,)), D(2), keras.layers.Dropout(0.5)])
    model.compile("adam", "mse")
    losses = model.fit(X, X[:, :2], batch_size=4, epochs=epochs, verbose=0).history["loss"]
    path = f"{folder}/model.keras"
    model.save(path)
    facts = {
        "status": [shardcore.status().strategy, shardcore.status().world_size],
        "names": [layer.name for layer in model.layers],
        "policy": [keras.config.dtype_policy().name, keras.config.epsilon()],
        "registered": keras.saving.get_registered_name(D),
        "program": [sys.path[-1], sys.argv[-1], os.getcwd(), weights.sum().item()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "draws": unseeded,
    }
    return facts, losses, path

def loaded(result):
    return keras.models.load_model(result[2]).predict(X, verbose=0).tolist()

found = {}
for start in ("fork", "spawn"):
    os.mkdir(start)
    keras.utils.set_random_seed(7)
    keras.random.uniform((1,)), random.random(), np.random.rand(), torch.rand(1)
    first, second = shardcore.launch(train, 2, start, start=start)
    assert first == second
    found[start] = first[0], first[1], loaded(first)
print(json.dumps(found))
"""


def test_new_interpreters_are_as_forked_ranks_and_their_files_load_in_the_notebook(tmp_path):
    done = warm.run(["-c", NOTEBOOK], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (facts, losses, values), (new_facts, new_losses, new_values) = found["fork"], found["spawn"]
    assert new_facts == facts
    assert facts["status"] == ["manual", 2]
    assert facts["registered"] == "mine>D"
    assert facts["policy"] == ["mixed_bfloat16", 1e-5]
    np.testing.assert_allclose(new_losses, losses, rtol=1e-5)
    np.testing.assert_allclose(new_values, values, rtol=1e-2)  # of bfloat16


class OfGpu(torch.Tensor):
    """A tensor that says it is of a GPU."""

    device = torch.device("cuda:0")


@pytest.mark.parametrize(
    ("value", "problem", "remedy"),
    [
        (lambda: keras.Sequential(name="net"), "a Keras model ('net')", "model.save(path)"),
        (lambda: [keras.layers.Dense(2, name="d")], "a layer ('d')", "Build it in the function"),
        (lambda: keras.Variable(1.0, name="v"), "a variable of Keras ('v')", "Build it"),
        (
            lambda: {"x": torch.zeros(2).as_subclass(OfGpu)},
            "a tensor on device 'cuda:0'",
            "keras.ops.convert_to_numpy(tensor), or tensor.cpu()",
        ),
        (threading.Lock, "cannot pickle '_thread.lock' object", "Make it in the function"),
    ],
)
def test_what_cannot_be_sent_is_an_error_that_names_the_variable(value, problem, remedy):
    held = value()

    def helper():
        return held

    def train(epochs):
        return helper(), epochs

    with pytest.raises(EnvironmentProblem) as refused:
        shardcore.launch(train, 2, 1, start="spawn")
    assert "variable 'held', which helper() reads, holds" in str(refused.value)
    assert problem in str(refused.value)
    assert remedy in str(refused.value)
    with pytest.raises(EnvironmentProblem, match="argument 'epochs' holds"):
        shardcore.launch(lambda epochs: epochs, 2, held, start="spawn")


def test_another_word_for_the_start_is_refused():
    with pytest.raises(EnvironmentProblem, match="got start='forkserver'"):
        shardcore.launch(print, 2, start="forkserver")


def build():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    return model


def test_plans_and_estimates_of_another_process_are_those_of_a_fork(monkeypatch):
    keras.utils.clear_session()
    build()  # a rule names the second model
    plan = shardcore.plan(build, Mesh((4,), ("data",)), policy="fully_sharded", small=0)
    search = partial(shardcore.plan, build, policy="auto", devices=2, rows=32)
    batch = np.ones((16, 8), "float32"), torch.ones(16, 4)
    found = []
    for can_fork in (new_ranks.fork_can_compute, lambda: False):
        monkeypatch.setattr(new_ranks, "fork_can_compute", can_fork)
        chosen = search(batch=batch)
        memory = shardcore.estimate_memory(plan, build, batch).to_dict()
        found.append((memory, str(chosen), str(chosen.ranking), list(chosen)))
    assert found[0] == found[1]
    assert any("sequential_1" in key for key in found[0][3])


def test_ranks_of_tests_are_new_interpreters_where_forked_ones_could_not_compute(monkeypatch):
    monkeypatch.setattr(new_ranks, "fork_can_compute", lambda: False)

    def total(rank):
        tensor = torch.tensor([rank + 1.0])
        torch.distributed.all_reduce(tensor)
        return tensor.item(), torch.get_default_dtype()

    assert run_ranks(total, 2) == [(3.0, torch.float32)] * 2


def refused(*_arguments):
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")


@pytest.mark.parametrize("name", ["torch.cuda.init", "torch.autograd.backward"])
def test_a_fork_in_which_torch_refuses_to_compute_is_found(monkeypatch, name):
    seen = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: seen)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert new_ranks.fork_can_compute()
    monkeypatch.setattr(name, refused)
    assert not new_ranks.fork_can_compute()
    with pytest.raises(EnvironmentProblem, match="Leave start= out"):
        shardcore.launch(print, 1, start="fork")


def test_this_process_says_what_it_holds_of_a_device(monkeypatch, caplog):
    emptied = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(torch.cuda, "memory_allocated", [0, 3 * 10**9].__getitem__)
    with caplog.at_level("WARNING", "shardcore.launch"):
        process_state.release()
    (line,) = caplog.messages
    assert "holds 3.00 GB of device cuda:1" in line
    assert emptied == [1]
