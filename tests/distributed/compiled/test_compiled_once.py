"""Programs of Inductor are stored on disk: an equal step of any process is loaded."""

import logging
import os
import re

import keras
import numpy as np
import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.decomposition import decompositions

import shardcore
from shardcore.adapters.torch_private import inductor
from shardcore.testing import run_ranks
from tests.distributed.programs import distribute, needs_compiler


def small_net():
    """Pooling and its decompositions, a dense layer: few kernels."""
    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential([keras.Input((8, 8, 3)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=True)
    return model


def losses_and_found():
    """The losses of steps; how often what they compile was found on disk, and how often not."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(8, 8, 8, 3)).astype("float32"), draw.integers(0, 10, 8)
    counters.clear()
    model = small_net()
    losses = [float(model.train_on_batch(x, y)) for _ in range(4)]
    kinds = ("hit", "miss", "bypass")
    assert not any("hit" in each or "miss" in each for each in counters["aot_autograd"])
    return losses, {each: counters["inductor"][f"fxgraph_cache_{each}"] for each in kinds}


def models(_rank, folder, count):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    distribute((1, 2), {"dense.*kernel": (None, "model")})
    of_torch = dict(decompositions)
    found = [losses_and_found() for _ in range(count)]
    assert decompositions == of_torch
    return found


@needs_compiler
def test_an_equal_step_is_compiled_once(tmp_path):
    ways = [run_ranks(models, 2, tmp_path, count, timeout=300) for count in (2, 1)]
    (first, second), *_ = ways[0]
    assert first[1]["bypass"] == 0
    assert first[1]["hit"] + first[1]["miss"] == 1
    assert any(rank[0][1]["miss"] for rank in ways[0])
    for losses, found in (second, *ways[1][0], *ways[1][1]):
        assert found == {"hit": 1, "miss": 0, "bypass": 0}
        assert losses == first[0]


def messages_of_compiling(_rank):
    shardcore.install("single")
    messages = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("shardcore.capture")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    scaled(2.0, jit_compile="auto")
    assert not messages
    scaled(2.0, jit_compile=True)
    return messages


@needs_compiler
def test_a_message_says_that_the_compiler_runs():
    [(began, ended)] = run_ranks(messages_of_compiling, 1, timeout=300)
    compiles = r"Inductor compiles a step of \d+ operators, unless torch has it on disk"
    assert re.fullmatch(compiles, began)
    assert re.fullmatch(r"Inductor has ended after \d+\.\d s", ended)


class Scaled(keras.layers.Layer):
    """Multiplies by what is a constant of the step."""

    def __init__(self, factors, **kwargs):
        super().__init__(**kwargs)
        self.factors = factors

    def call(self, inputs):
        return inputs * torch.tensor(self.factors)


def scaled(factors, **how):
    """Predictions, for which Inductor makes one kernel: a compiler takes a second for each."""
    model = keras.Sequential([keras.Input((4,)), Scaled(factors)])
    model.compile("sgd", "mse", **how)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    return [model.predict_on_batch(x) for _ in range(4)]


FACTORS = ([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]), ([2.0], [3.0]), (2.0, 3.0)


def of_constants(_rank, folder):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    shardcore.install("single")
    for factors in (each for pair in FACTORS for each in pair):
        found, eager = (scaled(factors, jit_compile=how) for how in (True, False))
        np.testing.assert_allclose(found, eager, rtol=1e-6, err_msg=f"factors {factors}")
    return counters["inductor"]["fxgraph_cache_miss"]


@needs_compiler
def test_a_program_is_not_run_with_other_constants(tmp_path):
    (programs,) = run_ranks(of_constants, 1, tmp_path, timeout=300)
    assert programs > 0


def compiled_for(_rank, folder, instructions):
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(folder), ATEN_CPU_CAPABILITY=instructions)
    # For one kernel of each kind to compile the headers beforehand takes longer than without.
    with config.patch(cpp_cache_precompile_headers=False):
        run = inductor.compile_graph(fx.symbolic_trace(lambda x: (x * 2,)), [torch.ones(64)])
    torch.testing.assert_close(run(torch.ones(64))[0], torch.full((64,), 2.0))
    return str(pick_vec_isa()), counters["inductor"]["fxgraph_cache_miss"]


@needs_compiler
def test_a_program_for_other_instructions_is_not_loaded(tmp_path):
    kinds = ["avx2", "default", "avx2", "default"]
    runs = [run_ranks(compiled_for, 1, tmp_path, each, timeout=300)[0] for each in kinds]
    instructions, misses = zip(*runs, strict=True)
    if instructions[0] == instructions[1]:
        pytest.skip(f"this processor has no other instructions than {instructions[0]!r}")
    assert misses == (1, 1, 0, 0)


def written_and_read(one, other):
    """Reads `other` when `one` was written into, which may share its memory."""
    torch.ops.aten.add_.Tensor(one, 1.0)
    return (torch.ops.aten.mul.Tensor(one, other),)


def apart_and_shared():
    """Operands of one form: of separate memories, and of one memory, in which they overlap.

    The second begins a little later: in one loop over both it would be read before it is written.
    """
    memory = torch.zeros(4100)
    return (torch.zeros(4096), torch.zeros(4096)), (memory[:-4], memory[4:])


def of_shared_memory(_rank, folder):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    for operands, same in zip(apart_and_shared(), apart_and_shared(), strict=True):
        run = inductor.compile_graph(fx.symbolic_trace(written_and_read), operands)
        torch.testing.assert_close(run(*operands), written_and_read(*same), rtol=0, atol=0)
        torch.testing.assert_close(operands, same, rtol=0, atol=0)


@needs_compiler
def test_a_program_for_separate_memories_is_not_run_with_shared_memory(tmp_path):
    run_ranks(of_shared_memory, 1, tmp_path, timeout=300)


def of_a_number(_rank):
    graph = fx.symbolic_trace(lambda x: (x * x.sum().item(),))
    with pytest.raises(Exception, match="_local_scalar_dense") as refused:
        inductor.compile_graph(graph, [torch.ones(4)])
    return type(refused.value).__name__


@needs_compiler
def test_a_number_of_a_tensor_becomes_no_symbol():
    assert run_ranks(of_a_number, 1, timeout=300) == ["DataDependentOutputException"]
