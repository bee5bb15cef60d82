"""`x.data = value` gives a sharded tensor the values, as on one device; or it is an error."""

import keras
import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

import shardcore
from shardcore.domain.errors import ShardedTensorError
from shardcore.testing import run_ranks
from tests.distributed.capture.steps import messages
from tests.distributed.idioms.running import A, B, make, run_idioms
from tests.distributed.programs import distribute

REASON = "replaces the memory of a tensor"


def of_a_tensor(make):
    x = make(A)
    x.data = make(B)
    return x * 1


def of_a_plain_value(make):
    x = make(A)
    x.data = torch.tensor(B)
    return x * 1


def of_a_gradient(make):
    x = torch.nn.Parameter(make(A))
    (x * x).sum().backward()
    x.grad.data = x.grad.data * 0.5
    return x.grad


def of_another_dtype(make):
    x = make(A)
    x.data = x.data.double()
    return x.dtype, (x * 1).dtype, x * 1


def of_other_strides(make):
    x = make(A)
    x.data = make(B.T.copy()).T
    return x * 1, x.T[1]


def kept_by_others(make):
    """The weights that an average replaces for an evaluation are put back after it."""
    x = torch.nn.Parameter(make(A))
    row, kept = x[1], x.data
    x.data = make(B)
    during = x * 1
    x.data = kept
    return during, row * 1, x * 1


def of_a_view(make):
    x = make(A)
    row = x[1]
    row.data = torch.zeros(6)
    row.add_(1)
    return x * 1, row


def shared_with_the_value(make):
    x, value = make(A), make(B)
    x.data = value
    value.add_(1)
    return x * 1


def of_all_parameters(make):
    parameters = [torch.nn.Parameter(make(A)), torch.nn.Parameter(make(B))]
    vector_to_parameters(parameters_to_vector(parameters) * 2, parameters)
    return [each * 1 for each in parameters]


def of_a_momentum_encoder(make):
    query, key = torch.nn.Parameter(make(A)), torch.nn.Parameter(make(B))
    key.data = key.data * 0.75 + query.data * 0.25
    return key @ make(A.T.copy())


def clipped(make):
    x = torch.nn.Parameter(make(A))
    x.data = x.data.clamp(-0.5, 0.5)
    return x.abs().max()


def pruned(make):
    module = torch.nn.Linear(6, 4, bias=False)
    module.weight = torch.nn.Parameter(make(A))
    prune.l1_unstructured(module, "weight", 0.5)
    prune.remove(module, "weight")
    return module.weight == 0, module.weight * 1


IDIOMS = [
    *(of_a_tensor, of_a_plain_value, of_a_gradient, of_another_dtype, of_other_strides),
    *(kept_by_others, of_a_view, of_all_parameters, of_a_momentum_encoder, clipped, pruned),
]


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_it_writes_as_on_one_device(strategy):
    run_idioms(IDIOMS, strategy)
    # A value in the layout of the tensor shares its memory from then on.
    run_idioms([shared_with_the_value], strategy, ("last", "first", "replicated"))


def test_another_shape_is_an_error():
    def program(rank):
        distribute((1, 2))
        x = make(A, "last")
        for value, found in ((torch.ones(2, 6), r"\(2, 6\)"), (3.0, "float")):
            with pytest.raises(
                ShardedTensorError, match=rf"shape \(4, 6\).*got {found}: make a new"
            ):
                x.data = value

    run_ranks(program, 2)


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_a_plain_tensor_gets_no_sharded_value(strategy):
    def program(rank):
        distribute((1, 2), strategy=strategy)
        value, weight = make(A, "last"), torch.nn.Linear(6, 4).weight
        (weight * 1).sum().backward()
        plain = [torch.zeros(4, 6), weight, weight.grad]
        for x in plain:
            with pytest.raises(
                ShardedTensorError, match=r"x that is not sharded.*full_tensor.*to_local"
            ):
                x.data = value
            x.data = value.full_tensor()
            assert torch.equal(x, torch.tensor(A))
        with pytest.raises(ShardedTensorError, match="x that is not sharded"):
            vector_to_parameters(value.reshape(-1), [weight])
        shardcore.uninstall()
        assert "data" not in vars(torch.Tensor)

    run_ranks(program, 2)


def build(kind=keras.Sequential):
    keras.utils.set_random_seed(1)
    model = kind([keras.Input((6,)), keras.layers.Dense(4, name="head")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


class Halves(keras.callbacks.Callback):
    """Halves a weight after each second batch, which a captured step must see."""

    def on_train_batch_end(self, batch, logs=None):
        if batch % 2:
            weight = self.model.layers[0].kernel.value
            weight.data = weight.data * 0.5


def fitted(*callbacks):
    model = build()
    x, y = np.tile(A, (8, 1)), np.tile(B[:, :4], (8, 1))
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.layers[0].kernel.numpy()


class HalvesInTheStep(keras.Sequential):
    def train_step(self, data):
        logs = super().train_step(data)
        weight = self.layers[0].kernel.value
        weight.data = weight.data * 0.5
        return logs


def fitted_in_the_step():
    said = messages()
    model = build(HalvesInTheStep)
    x, y = np.tile(A, (8, 1)), np.tile(B[:, :4], (8, 1))
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return model.layers[0].kernel.numpy(), said


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_captured_steps_see_it(strategy):
    def program(rank, is_distributed):
        if is_distributed:
            distribute((1, 2), {"head/kernel": (None, "model")}, strategy=strategy)
        return fitted(Halves()), *fitted_in_the_step()

    (between, within, _), *_ = run_ranks(program, 1, False)
    for found, found_within, said in run_ranks(program, 2, True):
        np.testing.assert_allclose(found, between, atol=1e-5)
        np.testing.assert_allclose(found_within, within, atol=1e-5)
        assert REASON in "".join(said)


def test_a_captured_step_on_one_device_sees_it():
    def program(rank):
        shardcore.install("single")
        return fitted_in_the_step()

    ((found, said),) = run_ranks(program, 1)
    ((expected, _),) = run_ranks(lambda rank: fitted_in_the_step(), 1)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert REASON in "".join(said)
