"""Policy `auto` refuses what it cannot search."""

import keras
import numpy as np
import pytest

import shardcore
from shardcore.domain.errors import MachineError, PolicyError
from shardcore.domain.layouts.mesh import Mesh

ROWS = np.ones((4, 3), "float32")
GIVEN = {"policy": "auto", "devices": 2, "batch": (ROWS, ROWS)}


def build():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"devices": None}, "chooses the mesh too: give the number of devices"),
        ({"devices": 0}, "got mesh=None, devices=0"),
        ({"mesh": Mesh((2,), ("data",))}, "chooses the mesh too"),
        ({"small": 0}, "has no option 'small'; it has"),
        ({"batch": None}, "give batch=, a batch"),
        ({"batch": ()}, "Expected a batch"),
        ({"rows": 0.5}, "Option 'rows': expected a number above 0, got 0.5"),
        ({"host": -1}, "Option 'host': expected a number above 0, got -1"),
        ({"rows": 3, "memory": 1}, "No layout fits"),
        ({"policy": "fully_sharded"}, "Policy 'fully_sharded' takes a mesh, and policy 'auto'"),
    ],
)
def test_wrong_options_are_an_error(changed, message):
    with pytest.raises(PolicyError, match=message):
        shardcore.plan(build, **{**GIVEN, **changed})


def test_a_built_model_is_an_error():
    with pytest.raises(PolicyError, match="give the function that builds and compiles it"):
        shardcore.plan(build(), **GIVEN)


def test_an_unknown_machine_is_an_error():
    with pytest.raises(MachineError, match="No machine 'm1': there are t4"):
        shardcore.plan(build, machine="m1", **GIVEN)
