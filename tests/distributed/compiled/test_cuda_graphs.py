"""Captured steps as CUDA graphs: the numbers of steps without, whatever happens between them.

Without a GPU a stand-in on the CPU replays them.
"""

import logging
import os
import time
from contextlib import nullcontext
from unittest.mock import patch

import keras
import numpy as np
import pytest
import torch
from keras import layers

import shardcore
from shardcore.adapters.capture.running import cuda_graphs
from shardcore.testing import RankFailed, run_ranks
from tests import cuda_graph
from tests.distributed.compiled.graph_parts import (
    attention,
    convolution,
    drawing,
    reading,
    reading_late,
    recurrent,
)
from tests.distributed.programs import DEVICE, HAS_NCCL, IS_ON_GPU

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 8, 16)).astype("float32"), RNG.normal(size=(12, 4)).astype("float32")
STEPS = 8
only_gpu = pytest.mark.skipif(not IS_ON_GPU, reason="the stand-in sees no generated code")
over_nccl = pytest.mark.skipif(IS_ON_GPU and not HAS_NCCL, reason="gloo has no CUDA graphs")


def graphs():
    """A context in which there are CUDA graphs."""
    return nullcontext() if IS_ON_GPU else cuda_graph.on_cpu()


def distribute(shape=(1, 1)):
    shardcore.install("dtensor")
    mesh = keras.distribution.DeviceMesh(shape, ["batch", "model"])
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["dense.*kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    )


def built(part, optimizer="adam", jit_compile="auto"):
    keras.utils.set_random_seed(5)
    x = keras.Input((8, 16))
    model = keras.Model(x, layers.Dense(4)(layers.GlobalAveragePooling1D()(part(x))))
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=jit_compile)
    return model


def logged():
    """The messages of the logger of captured steps about CUDA graphs, from now on."""
    messages, logger = [], logging.getLogger("shardcore.capture")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    return messages


def steps(rank, part, wanted, optimizer="adam", jit_compile="auto", shape=(1, 1)):
    """Losses, weights, a draw of torch's generator after them; the messages about graphs."""
    os.environ[cuda_graphs.VARIABLE] = wanted
    messages = logged()
    distribute(shape)
    model = built(part, optimizer, jit_compile)
    with graphs():
        losses = [model.train_on_batch(X + n, Y)[0] for n in range(STEPS)]
    found = [np.asarray(each) for each in (*losses, *model.get_weights())]
    of_graphs = [each for each in messages if "CUDA graph" in each]
    return found, torch.rand(4, device=DEVICE).tolist(), of_graphs


def compared(part, *options):
    """The messages about graphs of steps that have the numbers of steps without."""
    ((found, drawn, messages),) = run_ranks(steps, 1, part, "1", *options)
    ((expected, next_drawn, others),) = run_ranks(steps, 1, part, "0", *options)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert drawn == next_drawn
    assert not any("replayed as a CUDA graph, recorded" in each for each in others)
    return messages


def assert_replayed(messages):
    assert len(messages) == 1
    assert "is replayed as a CUDA graph" in messages[0]


def test_attention_with_dropout_is_replayed_and_draws_the_same():
    assert_replayed(compared(attention))


def test_convolutions_and_batch_statistics_are_replayed():
    assert_replayed(compared(convolution, "sgd"))


def test_a_recurrent_layer_is_replayed():
    assert_replayed(compared(recurrent, "rmsprop"))


@only_gpu
def test_a_step_that_inductor_compiled_is_replayed():
    assert_replayed(compared(attention, "adam", True))


def test_seeded_draws_and_numbers_that_are_checked_come_before_the_graph():
    assert_replayed(compared(drawing))
    assert_replayed(compared(reading))


def test_what_is_computed_before_a_late_check_is_given_to_the_graph():
    assert_replayed(compared(reading_late))


def interleaved(rank, wanted):
    """Steps between which weights change, and other programs run."""
    os.environ[cuda_graphs.VARIABLE] = wanted
    messages = logged()
    distribute()
    model, found = built(attention), []
    with graphs():
        for n in range(STEPS):
            found.append(np.asarray(model.train_on_batch(X + n, Y)))
            found.append(np.asarray(model.train_on_batch(X[:6], Y[:6])))
            found.append(np.asarray(model.test_on_batch(X, Y)))
            found.append(model.predict_on_batch(X))
            if n == 5:
                model.set_weights([0.5 * each for each in model.get_weights()])
    return found, sum("recorded in" in each for each in messages)


def test_what_happens_between_replays_is_seen():
    ((found, recorded),) = run_ranks(interleaved, 1, "1")
    ((expected, none),) = run_ranks(interleaved, 1, "0")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert recorded >= 4  # two sizes of training batches, evaluation, prediction
    assert none == 0


def moved(rank):
    """A step whose weight gets other memory between two replays."""
    messages = logged()
    x, weight = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE)
    step = cuda_graphs.Replayed(lambda x, w: (w.add_(x) * 2,), 1, cuda_graphs.Pool())
    with graphs(), torch.inference_mode():
        found = [step(x * n, weight)[0].tolist()[0] for n in range(4)]
    weight.data = 10 * weight
    with graphs(), torch.inference_mode():
        found += [step(x * n, weight)[0].tolist()[0] for n in range(2)]
    return found, messages


def test_a_weight_that_gets_other_memory_is_recorded_again():
    ((found, messages),) = run_ranks(moved, 1)
    assert found == [2.0, 4.0, 8.0, 14.0, 140.0, 142.0]
    assert ["is replayed as a CUDA graph" in each for each in messages] == [True, True]


def failing(rank):
    """A function that no graph can contain, which no check knows, and one recorded before."""
    messages = logged()
    pool = cuda_graphs.Pool()
    x, weight = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE)
    step = cuda_graphs.Replayed(lambda x, w: (w.add_(drawn(x)) * x.sum().item(),), 1, pool)
    good = cuda_graphs.Replayed(lambda x, w: (w.add_(drawn(x)) * 2,), 1, pool)
    with graphs(), torch.inference_mode():
        before = [good(x, weight)[0].tolist() for _ in range(3)]
        found = [step(x, weight)[0].tolist() for _ in range(4)]
        later = [good(x, weight)[0].tolist() for _ in range(4)]
    return before, found, later, ["without a CUDA graph" in each for each in messages]


def drawn(x):
    """The same values, after a draw of torch's generator."""
    return x + 0 * torch.rand_like(x)


def test_a_step_that_cannot_be_recorded_runs_without_a_graph_and_warns_once():
    ((before, found, later, failures),) = run_ranks(failing, 1)
    assert before == [[2.0 * n] * 4 for n in (2, 3, 4)]
    assert found == [[4.0 * n] * 4 for n in (5, 6, 7, 8)]
    assert later == [[2.0 * n] * 4 for n in (9, 10, 11, 12)]
    assert failures == [False, True, False]  # the good step is recorded again


@over_nccl
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@pytest.mark.parametrize("jit_compile", ["auto", pytest.param(True, marks=only_gpu)])
def test_collectives_are_replayed_if_the_user_asks_for_it(shape, jit_compile):
    options = ("sgd", jit_compile, shape)  # Adam makes much of rounding in a gradient that is zero
    replayed = run_ranks(steps, 2, attention, "nccl", *options)
    without = run_ranks(steps, 2, attention, "1", *options)
    for (found, drawn, messages), (expected, next_drawn, others) in zip(
        replayed, without, strict=True
    ):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert drawn == next_drawn
        assert_replayed(messages)
        assert all("it starts collectives" in each for each in others)


def summed(x, weight):
    """A step with a collective over all ranks."""
    functions = torch.ops._c10d_functional
    total = functions.all_reduce(x, "sum", torch.distributed.group.WORLD.group_name)
    return (weight.add_(functions.wait_tensor(total)),)


def summing(run=summed):
    """A step that has been replayed, with the weights of three steps; and its operands."""
    distribute((2, 1))
    step = cuda_graphs.Replayed(run, 1, cuda_graphs.Pool(), has_collectives=True)
    x, weight = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE)
    with torch.inference_mode():
        found = [step(x, weight)[0].tolist() for _ in range(3)]
    return found, step, x, weight


def moved_on_one_rank(rank):
    with graphs():
        found, step, x, weight = summing()
        assert found == [[3.0] * 4, [5.0] * 4, [7.0] * 4]
        with torch.inference_mode():
            step(x, weight.clone() if rank == 1 else weight)[0].tolist()


@over_nccl
def test_a_rank_whose_weight_has_moved_ends_all_with_a_remedy():
    with pytest.raises(RankFailed, match="Assign to a variable in place") as failure:
        run_ranks(moved_on_one_rank, 2)
    assert failure.value.rank == 1


def unrecorded_on_one_rank(rank):
    with graphs():
        summing(lambda x, weight: summed(x * x.sum().item() if rank == 1 else x, weight))


@over_nccl
def test_a_rank_that_cannot_record_ends_all_with_a_remedy():
    with pytest.raises(RankFailed, match="record a CUDA graph with collectives, as the others do"):
        run_ranks(unrecorded_on_one_rank, 2)


def alone(rank):
    """A replay that rank 1 does not start."""
    with graphs(), patch.object(cuda_graph.Event, "query", never) if rank == 0 else nullcontext():
        _, step, x, weight = summing()
        if rank == 0:
            if not IS_ON_GPU:  # the stand-in would wait in Python, as no GPU does
                step._graph.calls.clear()
            with torch.inference_mode():
                step(x, weight)
        time.sleep(30)


def never(event):
    return False


@over_nccl
def test_a_rank_that_waits_in_a_graph_ends_with_the_timeout(monkeypatch, capfd):
    monkeypatch.setenv("SHARDCORE_TIMEOUT", "3")
    with pytest.raises(RankFailed):
        run_ranks(alone, 2)
    expected = "Rank 0 waited 3 seconds in a CUDA graph with collectives, in which not all"
    assert expected in capfd.readouterr().err
