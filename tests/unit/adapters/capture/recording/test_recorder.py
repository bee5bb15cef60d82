"""A recording has the calls that compute; what concerns autograd alone is not in it."""

import keras
import pytest
import torch

import shardcore
from shardcore.adapters.capture.running.generated import function_of
from tests.traces import names, recorded

X = torch.arange(6.0).reshape(2, 3)


def test_an_alias_is_its_tensor():
    def step(x):
        return (x.detach() * 2).detach().add_(1)

    trace = recorded(step, X)
    assert names(trace) == ["mul", "add_"]
    assert torch.equal(function_of(trace, {})(X.clone())[0], X * 2 + 1)


def test_a_write_into_an_alias_is_a_write_into_its_tensor():
    def step(x):
        y = x * 2
        y.detach().add_(1)
        return y

    assert torch.equal(function_of(recorded(step, X), {})(X.clone())[0], X * 2 + 1)


def test_a_view_of_the_own_shape_is_its_tensor():
    def step(x):
        with torch._C._AutoDispatchBelowAutograd():  # as where DTensor wraps its part of a result
            return (x * 2).view_as(x) + x.view_as(x)

    trace = recorded(step, X)
    assert names(trace) == ["mul", "view_as", "add"]
    assert torch.equal(function_of(trace, {})(X.clone())[0], X * 3)


def test_a_constant_that_is_written_into_is_created_in_each_run():
    def step(x):
        return torch.tensor([1.0, 2.0, 3.0]).add_(x[0])

    trace = recorded(step, X)
    run = function_of(trace, {n: trace.first_values[n] for n in trace.outside})
    assert run(X)[0].tolist() == run(X)[0].tolist() == step(X).tolist()


def test_a_tensor_that_is_transposed_in_place_keeps_its_new_strides():
    class Turns(keras.layers.Layer):
        def call(self, x):
            turned = x * 2
            turned.transpose_(1, 2)
            return turned.transpose(1, 2) * keras.ops.arange(5.0)

    shardcore.install("single")
    try:
        model = keras.Sequential([keras.Input((3, 5)), Turns(), keras.layers.Dense(2)])
        x = torch.randn(4, 3, 5)
        model.compile("sgd", "mse", jit_compile=False)
        expected = model.predict_on_batch(x)
        model.compile("sgd", "mse")
        for _ in range(4):
            assert model.predict_on_batch(x).tolist() == expected.tolist()
    finally:
        shardcore.uninstall()


@pytest.mark.parametrize("where", [(), (1, (4,), (1,))])
def test_a_tensor_on_the_storage_of_another_is_a_view_of_it(where):
    """As torch looks for the weights of a recurrent layer in one storage, for cuDNN."""

    def step(x):
        y = x * 2
        joined = torch.empty(0).set_(y.untyped_storage(), *where)
        y.add_(1)
        return joined * 3

    trace = recorded(step, X)
    assert trace.refusal == ""
    run = function_of(trace, {n: trace.first_values[n] for n in trace.outside})
    assert torch.equal(run(2 * X)[0], step(2 * X))


@pytest.mark.parametrize("where", [(), (0, (4,), (1,))])
def test_a_tensor_on_a_storage_of_no_other_is_no_part_of_a_program(where):
    values = torch.ones(4)

    def step(x):
        return x[0, 0] * torch.empty(0).set_(values.untyped_storage(), *where)

    assert "a tensor gets the storage of another one" in recorded(step, X).refusal
