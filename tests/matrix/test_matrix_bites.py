"""A wrong rule turns both matrices red: of which operator is trusted, and of how one is split."""

import attrs
import keras
import pytest
import torch

from shardcore.adapters import dtensor_trust
from shardcore.adapters.dtensor_operators import OPERATORS
from shardcore.domain import operator_rules_table as table
from tests.matrix import placing
from tests.matrix.layer_cases import LAYERS, case, reals
from tests.matrix.ops_cases import CASES
from tests.matrix.ops_run import over_mesh
from tests.matrix.parity import Mesh
from tests.matrix.suite import Classes, unexpected

aten = torch.ops.aten


def trust(monkeypatch, operator):
    """Leave the operator to DTensor; ranks are forked, and inherit it."""
    monkeypatch.setitem(dtensor_trust.DISTRUSTED, operator, lambda args: False)


def forget_a_sum(monkeypatch):
    """The gradient of a kernel counts as whole on a rank that has seen its own rows only."""
    right = table.convolution_backward

    def wrong(*numbers):
        rule = right(*numbers)
        of_input, of_kernel, of_bias = rule.results
        forgetting = attrs.evolve(of_kernel, dims=str(of_kernel), of=("kernel",))
        return attrs.evolve(rule, results=(of_input, forgetting, of_bias))

    monkeypatch.setattr(table, "convolution_backward", wrong)


def leave_any_to_dtensor(monkeypatch):
    for operator in (aten.any.default, aten.any.dim, aten.any.dims):
        monkeypatch.delitem(OPERATORS._handlers, operator)


PLANTED = {
    "a reduction over no dims": (lambda patch: trust(patch, aten.sum.dim_IntList), "amax"),
    "bits of a pending sum": (lambda patch: trust(patch, aten.view.dtype), "view"),
    "a rule without its sum": (forget_a_sum, "conv"),
    "a truth value that adds up": (leave_any_to_dtensor, "any"),
}


@pytest.mark.parametrize(("plant", "name"), PLANTED.values(), ids=PLANTED)
def test_a_function_is_wrong(monkeypatch, plant, name):
    def found():
        return unexpected(over_mesh({name: CASES[name]}, placing.MESHES["(2,)"]))

    assert found() == {}
    plant(monkeypatch)
    assert any(outcome.status == "WRONG" for outcome in found().values())


def over_largest():
    return keras.layers.Lambda(lambda x: x / keras.ops.amax(x))


CONVOLUTION = next(each for each in LAYERS if each.name == "Conv2D")
LAYERS_PLANTED = {
    "a reduction over no dims": (
        lambda patch: trust(patch, aten.sum.dim_IntList),
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
