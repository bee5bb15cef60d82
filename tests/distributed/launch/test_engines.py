"""Cells that run on all ranks: the engines of a cluster keep a model between them."""

import ast
import re
import socket
import sys
from pathlib import Path

import attrs
import ipyparallel
import keras
import numpy as np
import pytest

import shardcore
from shardcore.adapters.ranks.launch import engines
from shardcore.adapters.ranks.launch.engines import EngineFacts
from shardcore.domain.errors import EnvironmentProblem
from tests.checks.tree import ROOT
from tests.distributed.launch.notebooks import run

PAGE = (ROOT / "docs/how-to/notebooks.md").read_text()
CELLS = re.findall(r"^```ipython\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

JOINS_AGAIN = "shardcore.join_engines(client)"
ALL_FAIL = "%%px\nraise ValueError('on all ranks')"
GOES_ON = "%%px\nprint(len(model.fit(x, x[:, :4], verbose=0).history['loss']), 'epoch')"
BEGIN_INTERRUPT = """
import os, signal, threading
threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
"""
SLEEP = "%%px\nimport time\nfor _ in range(600):\n    time.sleep(0.1)"
# A kernel drops what is sent while it ends a cell with an error.
WAIT = """
import time
while {rank.state for rank in engines.status().ranks} != {"waits for a cell"}:
    time.sleep(0.1)
time.sleep(0.5)
"""
# One rank fails while the other waits for it: in a cell, and in a function that is sent to all.
IN_A_CELL = """%%px
import shardcore
if shardcore.status().rank == 1:
    raise ValueError("on one rank")
model.fit(x, x[:, :4], verbose=0)
"""
IN_A_FUNCTION = """
def train():
    import shardcore
    if shardcore.status().rank == 1:
        raise ValueError("on one rank")
    return model.fit(x, x[:, :4], verbose=0).history["loss"]

engines.view.apply_sync(train)
"""
AFTER = """
import time
deadline = time.monotonic() + 30
while {rank.state for rank in engines.status().ranks} != {"has ended"}:
    assert time.monotonic() < deadline, engines.status()
    time.sleep(0.1)
processes = [rank.process for rank in engines.status().ranks]
engines.stop()
print(processes)
"""


@pytest.mark.parametrize("one_fails", [IN_A_CELL, IN_A_FUNCTION], ids=["cell", "function"])
def test_a_model_stays_in_the_ranks_from_cell_to_cell(tmp_path, one_fails):
    interrupted = [BEGIN_INTERRUPT, SLEEP, WAIT, GOES_ON]
    cells = [*CELLS, JOINS_AGAIN, ALL_FAIL, GOES_ON, *interrupted, one_fails, AFTER]
    shown = run(cells, tmp_path)
    joined, built, trained, again, all_fail, *goes_on, one_fails, after = shown
    assert joined.count("waits for a cell") == 2
    assert "Error" not in built
    losses = [ast.literal_eval(line) for line in re.findall(r"\[\d.*\]", trained)]
    assert len(losses) == 2
    assert losses[0] == losses[1]
    np.testing.assert_allclose(losses[0], one_device(), rtol=1e-5)
    assert "EnvironmentProblem: Engine 0 is a rank of a job of 2 already" in again
    assert all_fail.count("ValueError: on all ranks") >= 2
    assert "Keyboard" in goes_on[2]
    assert [text.count("1 epoch") for text in goes_on] == [2, 0, 0, 0, 2]
    assert "rank 1, which has ended its cell with ValueError: on one rank" in one_fails
    processes = ast.literal_eval(after.splitlines()[-1])
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def one_device():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    x = np.ones((64, 8), "float32")
    return model.fit(x, x[:, :4], batch_size=16, epochs=5, verbose=0).history["loss"]


class Client(ipyparallel.Client):
    """A client of engines that are not there."""

    def __init__(self, numbers):
        self.numbers = numbers

    ids = property(lambda self: self.numbers)
    __del__ = object.__repr__


FACTS = EngineFacts(process=1, host=socket.gethostname(), size=0)


@pytest.mark.parametrize(
    ("client", "devices", "facts", "message"),
    [
        (None, None, FACTS, "takes the ipyparallel.Client of a cluster, got None"),
        (Client([]), None, FACTS, "asked for at least 1 engine, and the cluster has 0"),
        (Client([0, 1]), 4, FACTS, "asked for 4 engines, and the cluster has 2"),
        (Client([0]), 0, FACTS, "asked for 0 engines, and the cluster has 1"),
        (Client([3]), 1, attrs.evolve(FACTS, host="far"), "engine 3 is on 'far': start ranks of"),
        (Client([3]), 1, attrs.evolve(FACTS, size=2), "Engine 3 is a rank of a job of 2 already"),
    ],
)
def test_engines_that_cannot_be_ranks_are_refused(monkeypatch, client, devices, facts, message):
    monkeypatch.setattr(engines, "_facts_of", lambda client, number: facts)
    with pytest.raises(EnvironmentProblem, match=message):
        shardcore.join_engines(client, devices)


class Busy:
    """A view of an engine that runs a cell, and the result that is not there."""

    def apply_async(self, function):
        return self

    def wait(self, timeout):
        assert timeout > 0

    def ready(self):
        return False


def test_an_engine_that_runs_a_cell_is_named_in_time(monkeypatch):
    monkeypatch.setattr(Client, "__getitem__", lambda client, number: Busy())
    with pytest.raises(EnvironmentProblem, match=r"Engine 3 has not answered .* for 30 s"):
        shardcore.join_engines(Client([3]))


def test_a_missing_ipyparallel_is_an_error_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipyparallel", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'shardcore\[notebook\]'"):
        shardcore.join_engines(None)
