"""The figures of the demo are those of the shapes, and of the theory of Megatron."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests import warm

EXAMPLES = Path(__file__).parents[3] / "examples"

WIDTH, VOCABULARY, LENGTH, BLOCKS = 128, 256, 64, 2
# query, key, value and output kernels, the two kernels of the hidden layer; sharded biases
SHARDED = BLOCKS * ((4 + 8) * WIDTH**2 + (3 + 4) * WIDTH)
# embeddings, two biases and two norms a block, the last norm, the head
WHOLE = (VOCABULARY + LENGTH) * WIDTH + BLOCKS * 6 * WIDTH + 2 * WIDTH + (WIDTH + 1) * VOCABULARY
# Adam keeps two numbers for each, an int32 of iterations and a float32 of the learning rate.
ADAM = 8


# The demo with the processes that it starts forked; tests of the README run torchrun itself.
DEMO = """
import subprocess, demo
from tests import warm

def run(command, env, check):
    _, *words = command
    ranks = 2 if "torch.distributed.run" in words else 0
    words = words[words.index(demo.TRAIN):]
    started = warm.start_ranks(words, 2, env) if ranks else [warm.Program(words, env)]
    printed = [each.communicate(240) for each in started]
    print(*(text for streams in printed for text in streams))
    return subprocess.CompletedProcess(command, max(each.returncode for each in started))

demo.subprocess.run = run
demo.main()
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    facts = tmp_path_factory.mktemp("demo") / "facts.json"
    sizes = ["--epochs", "2", "--windows", "16", "--json", str(facts)]
    paths = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    done = warm.run(["-c", DEMO, *sizes], {**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(facts.read_text())


def test_the_losses_are_those_of_one_device_on_every_rank(demo):
    _, facts = demo
    one, tensor_parallel, data_parallel = facts["runs"]
    assert [len(run["ranks"]) for run in facts["runs"]] == [1, 2, 2]
    assert one["ranks"][0]["loss"][1] < one["ranks"][0]["loss"][0]
    for rank in tensor_parallel["ranks"] + data_parallel["ranks"]:
        np.testing.assert_allclose(rank["loss"], one["ranks"][0]["loss"], atol=1e-5)
    assert max(run["weight_difference"] for run in facts["runs"]) < 1e-3


def test_tensor_parallel_ranks_keep_half_of_what_the_rules_shard(demo):
    _, facts = demo
    one, tensor_parallel, data_parallel = facts["runs"]
    whole, half = 4 * (SHARDED + WHOLE), 4 * (SHARDED // 2 + WHOLE)
    for rank in one["ranks"] + data_parallel["ranks"]:
        assert rank["variables"] == {"here": whole, "whole": whole}
    for rank in tensor_parallel["ranks"]:
        assert rank["variables"] == {"here": half, "whole": whole}
        assert rank["optimizer"]["here"] == 2 * half + ADAM


def test_collectives_are_those_of_the_theory(demo):
    _, facts = demo
    one, tensor_parallel, data_parallel = facts["runs"]
    assert one["ranks"][0]["collectives"] == {}
    for rank in tensor_parallel["ranks"]:
        # per block: attention and hidden layer, forward and backward
        assert rank["collectives"] == {"all_reduce": 4 * BLOCKS}
    for rank in data_parallel["ranks"]:
        # two buckets of gradients: the first is sent while the backward pass goes on, and the loss
        # moves with the second
        assert rank["collectives"] == {"all_reduce": 2}


def test_one_rank_shows_progress_and_a_table_ends_it(demo):
    shown, _ = demo
    assert shown.startswith("Trains one Keras model three times")
    assert shown.count("Epoch 2/2") == 3
    assert "8 all-reduce" in shown
    assert "The three agree, after " in shown.splitlines()[-1]


def test_the_table_fits_a_terminal_of_80_columns(demo):
    shown, _ = demo
    rows = [line for line in shown.splitlines() if line.startswith(("│", "┃", "┏"))]
    assert len(rows) > 8
    assert max(map(len, rows)) <= 80
