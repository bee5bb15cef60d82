"""Batches that differ in more than their values: each step has the numbers of an eager one."""

from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.capture.steps import messages


class Own(dict):
    """A dict with attributes."""


class OwnList(list):
    """A list with attributes."""


class OwnFloat(float):
    """A number with attributes."""


class OwnTensor(torch.Tensor):
    """A tensor of another class."""


def with_rate(value):
    value.rate = 2.0
    return value


def rate_of(value):
    return getattr(value, "rate", 1.0)


def ones():
    return torch.ones(4, 3)


def complex_ones():
    return torch.complex(torch.ones(4, 3), torch.ones(4, 3))


def with_gradient():
    batch = ones()
    batch.grad = ones()
    return batch


# By name: a batch, another one, what a step reads of both, and whether it runs eagerly.
BATCHES = {
    "dict": (lambda: Own(x=ones()), lambda: with_rate(Own(x=ones())), rate_of, True),
    "list": (lambda: OwnList([ones()]), lambda: with_rate(OwnList([ones()])), rate_of, True),
    "number": (lambda: OwnFloat(1.0), lambda: with_rate(OwnFloat(1.0)), rate_of, True),
    "attribute": (ones, lambda: with_rate(ones()), rate_of, True),
    "parameter": (
        ones,
        lambda: torch.nn.Parameter(ones(), requires_grad=False),
        lambda batch: 1.0 + isinstance(batch, torch.nn.Parameter),
        True,
    ),
    "class": (
        ones,
        lambda: ones().as_subclass(OwnTensor),
        lambda batch: 1.0 + isinstance(batch, OwnTensor),
        True,
    ),
    "gradient": (ones, with_gradient, lambda batch: 1.0 + (batch.grad is not None), True),
    "conjugated": (
        complex_ones,
        lambda: complex_ones().conj(),
        lambda batch: batch.imag.mean(),
        False,
    ),
    "keys": (
        lambda: {"a": ones(), 1: ones()},
        lambda: {"a": ones(), 1: 2 * ones()},
        lambda batch: batch[1].mean(),
        True,
    ),
}


class Model(keras.Model):
    """A model whose loss is what it reads of a batch."""

    def __init__(self, read):
        super().__init__()
        self.read = read
        self.weight = self.add_weight(shape=(), initializer="ones")

    def train_step(self, data):
        return {"loss": keras.ops.stop_gradient(self.weight * self.read(data))}


def losses(name, jit):
    first, second, read, _ = BATCHES[name]
    model = Model(read)
    model.compile("sgd", jit_compile=jit)
    model.make_train_function()
    batches = [first() for _ in range(4)] + [second() for _ in range(4)]
    return [float(model.train_function([batch])["loss"]) for batch in batches]


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_of_another_kind_is_seen(name, monkeypatch):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")

    def program(rank):
        shardcore.install("single")
        said = messages()
        return losses(name, False), losses(name, "auto"), list(said)

    ((eager, captured, said),) = run_ranks(program, 1)
    assert captured == eager
    assert eager[3] != eager[4]
    assert [("its batch" in text) for text in said] == [True] * BATCHES[name][3]


def test_steps_on_another_thread_are_not_captured_with_a_message(monkeypatch):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")

    def program(rank):
        shardcore.install("single")
        said, model = messages(), keras.Sequential([keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        x = np.ones((4, 3), "float32")
        with ThreadPoolExecutor(1, "own") as threads:
            numbers = [threads.submit(model.predict_on_batch, x).result() for _ in range(4)]
        return numbers, said

    ((numbers, said),) = run_ranks(program, 1)
    for prediction in numbers:
        np.testing.assert_array_equal(prediction, numbers[0])
    (text,) = said
    assert "runs on thread 'own_0', and steps are captured on the main one alone" in text
