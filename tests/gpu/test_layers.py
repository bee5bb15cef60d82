"""Every layer of Keras on a mesh of one GPU, compared with plain Keras on it."""

from tests.matrix.layer_cases import LAYERS, NOT_ON_ONE_DEVICE
from tests.matrix.parity import Mesh, one_device, over_mesh


def test_every_layer_has_the_numbers_of_plain_keras_on_a_mesh_of_one() -> None:
    cases = [each for each in LAYERS if each.name not in NOT_ON_ONE_DEVICE]
    outcomes = over_mesh(cases, Mesh((1, 1), "last"), one_device(cases))
    bad = {name: each for name, each in outcomes.items() if each.status in ("error", "WRONG")}
    assert not bad
    assert len(outcomes) > 100
