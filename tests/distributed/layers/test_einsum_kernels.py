"""A kernel of three dims, however two axes shard it: its matrix is a view, gathered along one."""

from itertools import permutations, product

import keras
import numpy as np
import pytest

from shardcore.testing import run_ranks
from tests.distributed.programs import distribute, local

RNG = np.random.default_rng(0)
EQUATIONS = {"abc,cde->abde": (4, 4, 8), "abcd,cde->abe": (4, 8, 4)}
BOTH = list(permutations(("data", "model")))
SPECS = [
    *(tuple(axes if at == dim else None for at in range(3)) for axes in BOTH for dim in range(3)),
    *(
        tuple({one: "data", other: "model"}.get(at) for at in range(3))
        for one, other in product(range(3), repeat=2)
        if one != other
    ),
]


def x_for(equation):
    size = EQUATIONS[equation]
    return RNG.normal(size=(4, 3, *size[: equation.index(",") - 2])).astype("float32")


BATCHES = {equation: x_for(equation) for equation in EQUATIONS}


def learned(rank, equation, spec):
    """The output of the layer, and its kernel after one step of gradient descent."""
    distribute((2, 2), {".*kernel": spec})
    x = BATCHES[equation]
    shape = np.einsum(equation, x, np.empty(EQUATIONS[equation])).shape
    layer = keras.layers.EinsumDense(equation, (None, *shape[2:]))
    inputs = keras.Input(x.shape[1:])
    model = keras.Model(inputs, layer(inputs))
    model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=False)
    assert 4 * local(layer.kernel).size == np.prod(EQUATIONS[equation])
    before = keras.ops.convert_to_numpy(layer.kernel)
    outputs = model.predict_on_batch(x)
    model.train_on_batch(x, np.zeros(shape, "float32"))
    return before, outputs, before - keras.ops.convert_to_numpy(layer.kernel)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_values_and_gradients_are_those_of_numpy(equation):
    def program(rank):
        return [learned(rank, equation, spec) for spec in SPECS]

    given, other = equation.partition("->")[0].split(",")
    made = equation.partition("->")[2]
    x = BATCHES[equation]
    for results in run_ranks(program, 4, timeout=120):
        for spec, (kernel, outputs, change) in zip(SPECS, results, strict=True):
            expected = np.einsum(equation, x, kernel)
            gradient = np.einsum(f"{given},{made}->{other}", x, 2 * expected / expected.size)
            np.testing.assert_allclose(outputs, expected, atol=1e-5, err_msg=str(spec))
            np.testing.assert_allclose(change, gradient, atol=1e-5, err_msg=str(spec))
