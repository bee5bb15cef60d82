"""A wrong rule turns both matrices red."""

import attrs
import keras
import pytest
import torch

from shardcore.adapters.engine.operators import PLANNERS
from shardcore.domain.engine.call import PlacedTensor
from shardcore.domain.engine.choice import choose
from shardcore.domain.engine.rules import layers
from tests.matrix import placing
from tests.matrix.cases.layers import LAYERS, case, reals
from tests.matrix.cases.ops import CASES
from tests.matrix.ops_run import over_mesh
from tests.matrix.parity import Mesh
from tests.matrix.suite import Classes, unexpected

aten = torch.ops.aten


def forget_to_reduce(monkeypatch, operator):
    """Makes each local result count as replicated; forked ranks inherit this."""
    right = PLANNERS[operator]

    def wrong(*call):
        task = right(*call)
        (tensor,) = task.operands
        sharding = choose(task.rule, (PlacedTensor(tensor.shape, tensor.form.layout),))
        results = tuple(each.reduced for each in sharding.results)
        return attrs.evolve(task, layouts=attrs.evolve(sharding, results=results))

    monkeypatch.setitem(PLANNERS, operator, wrong)


def forget_a_sum(monkeypatch):
    """The gradient of a kernel counts as whole on a rank that has seen its own rows only."""
    right = layers.convolution_backward

    def wrong(*numbers):
        rule = right(*numbers)
        of_input, of_kernel, of_bias = rule.results
        forgetting = attrs.evolve(of_kernel, dims=str(of_kernel), of=(2,))  # the kernel
        return attrs.evolve(rule, results=(of_input, forgetting, of_bias))

    monkeypatch.setattr(layers, "convolution_backward", wrong)


PLANTED = {
    "a maximum of each rank": (lambda patch: forget_to_reduce(patch, aten.amax.default), "amax"),
    "a rule without its sum": (forget_a_sum, "conv"),
}


@pytest.mark.parametrize(("plant", "name"), PLANTED.values(), ids=PLANTED)
def test_a_function_is_wrong(monkeypatch, plant, name):
    def found():
        return unexpected(over_mesh({name: CASES[name][:3]}, placing.MESHES["(2,)"]))

    assert found() == {}
    plant(monkeypatch)
    assert any(outcome.status == "WRONG" for outcome in found().values())


def over_largest():
    return keras.layers.Lambda(lambda x: x / keras.ops.amax(x))


CONVOLUTION = next(each for each in LAYERS if each.name == "Conv2D")
LAYERS_PLANTED = {
    "a maximum of each rank": (
        lambda patch: forget_to_reduce(patch, aten.amax.default),
        case("Lambda/largest", over_largest, reals(4)),
    ),
    "a rule without its sum": (forget_a_sum, CONVOLUTION),
}


@pytest.mark.parametrize(("plant", "planted"), LAYERS_PLANTED.values(), ids=LAYERS_PLANTED)
def test_a_layer_is_wrong(monkeypatch, plant, planted):
    layers = Classes([planted], None, (), on=(Mesh((2,)),))

    def found():
        return unexpected(layers.run(*layers.meshes()))

    assert found() == {}
    plant(monkeypatch)
    assert list(found()) == [planted.name]
