"""Every public function of `keras.ops` gives the values and gradients of one device.

Every other one of the cases marked fast, on one mesh axis; `make matrix-full` runs all of them on
all meshes.
"""

import pytest

from tests.matrix import placing, suite
from tests.matrix.cases.ops import CASES, public_functions
from tests.matrix.ops_run import over_mesh


def test_every_public_function_has_a_case():
    assert set(CASES) == set(public_functions())


def test_values_and_gradients_are_those_of_one_device():
    chosen = {name: [case for case in cases if case.fast][::2] for name, cases in CASES.items()}
    outcomes = over_mesh(chosen, placing.MESHES["(2,)"])
    assert len(outcomes) > 300
    assert suite.unexpected(outcomes) == {}


def test_a_dim_that_two_axes_shard():
    names = ("depth_to_space", "dot", "in_top_k", "take")
    # Keras 3.13 has no `depth_to_space`.
    chosen = {name: CASES[name][:1] for name in names if name in CASES}
    outcomes = over_mesh(chosen, placing.MESHES["(2, 2)"])
    assert suite.unexpected(outcomes) == {}


@pytest.mark.parametrize("name", suite.DOCUMENTED_ERRORS)
def test_every_documented_error_happens(name):
    tables = suite.TABLES.values()
    outcomes = [found for each in tables for found in each.run(each.meshes()[0], [name]).values()]
    assert "error" in {outcome.status for outcome in outcomes}
