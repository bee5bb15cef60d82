"""A power by a number has the type and the numbers of plain Keras, and a short gradient."""

import itertools

import keras
import numpy as np
import pytest
import torch
from torch.profiler import profile

import shardcore

EXPONENTS = (2, 3, -1, 0, 0.5, 2.0, True)
TENSORS = [
    torch.tensor([[0.0, 1.5], [2.0, 3.0]], dtype=dtype)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32)
]
TENSORS += [torch.tensor(1.5), torch.tensor(1.5, dtype=torch.bfloat16)]


@pytest.fixture
def installed():
    shardcore.install("single")
    yield
    shardcore.uninstall()


def powers():
    return [
        keras.ops.power(x, exponent)
        for x, exponent in itertools.product(TENSORS, EXPONENTS)
        if x.is_floating_point() or exponent != -1  # torch refuses it
    ]


def gradient_of(exponent):
    x = torch.tensor([[0.5, 1.5]], requires_grad=True)
    keras.ops.power(x, exponent).sum().backward()
    return x.grad


def test_the_types_and_numbers_are_those_of_plain_keras():
    expected = powers()
    shardcore.install("single")
    try:
        found = powers()
    finally:
        shardcore.uninstall()
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("exponent", [2, 3, 0.5, 2.0])
def test_the_gradient_is_that_of_calculus(exponent):
    expected = exponent * np.array([[0.5, 1.5]]) ** (exponent - 1)
    np.testing.assert_allclose(gradient_of(exponent).numpy(), expected, rtol=1e-6)


@pytest.mark.usefixtures("installed")
def test_the_gradient_makes_no_mask_of_zeros():
    with profile(acc_events=True) as profiled:  # torch 2.11 warns without it
        gradient_of(2)
    names = {event.key for event in profiled.key_averages()}
    assert "aten::where" not in names
