"""A wrong rule turns both matrices red: operators that are trusted wrongly on purpose are seen."""

import keras
import pytest
import torch

from shardcore.adapters import dtensor_trust
from tests.matrix import placing
from tests.matrix.layer_cases import case, reals
from tests.matrix.ops_cases import CASES
from tests.matrix.ops_run import over_mesh
from tests.matrix.parity import Mesh
from tests.matrix.suite import Classes, unexpected

aten = torch.ops.aten


def trust(monkeypatch, operator):
    """Leave the operator to DTensor; ranks are forked, and inherit it."""
    monkeypatch.setitem(dtensor_trust.DISTRUSTED, operator, lambda args: False)


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        pytest.param("amax", aten.sum.dim_IntList, id="a reduction over no dims"),
        pytest.param("view", aten.view.dtype, id="bits of a pending sum"),
    ],
)
def test_a_function_is_wrong(monkeypatch, name, operator):
    def found():
        return unexpected(over_mesh({name: CASES[name]}, placing.MESHES["(2,)"]))

    assert found() == {}
    trust(monkeypatch, operator)
    assert any(outcome.status == "WRONG" for outcome in found().values())


def test_a_layer_is_wrong(monkeypatch):
    def over_largest():
        return keras.layers.Lambda(lambda x: x / keras.ops.amax(x))

    table = Classes([case("Lambda/largest", over_largest, reals(4))], None, (), on=(Mesh((2,)),))

    def found():
        return unexpected(table.run(*table.meshes()))

    assert found() == {}
    trust(monkeypatch, aten.sum.dim_IntList)
    assert [outcome.status for outcome in found().values()] == ["WRONG"]
