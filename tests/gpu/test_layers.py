"""Every layer of Keras on a mesh of one GPU, compared with plain Keras on it."""

import attrs
import pytest

from tests.matrix.cases.layers import LAYERS, NOT_ON_ONE_DEVICE
from tests.matrix.parity import Mesh, one_device, over_mesh

# The tests run side by side.
PARTS = 4
# cuDNN sums in another order for a tensor of other strides; a logarithm makes more of it.
TOLERANCE = 5e-4


@pytest.mark.parametrize("part", range(PARTS))
def test_every_layer_has_the_numbers_of_plain_keras_on_a_mesh_of_one(part: int) -> None:
    cases = [
        attrs.evolve(each, tolerance=max(each.tolerance, TOLERANCE))
        for each in LAYERS
        if each.name not in NOT_ON_ONE_DEVICE
    ][part::PARTS]
    outcomes = over_mesh(cases, Mesh((1, 1), "last"), one_device(cases))
    bad = {name: each for name, each in outcomes.items() if each.status in ("error", "WRONG")}
    assert not bad
    assert len(outcomes) > 100 // PARTS
