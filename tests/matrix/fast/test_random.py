"""Random operators draw the values of one device."""

import pytest
import torch

from tests.matrix import placing
from tests.matrix.cases.ops import p, run
from tests.matrix.ops_run import over_mesh
from tests.matrix.suite import unexpected


@pytest.mark.parametrize("mesh", placing.MESHES)
def test_random_operators_of_torch_draw_the_values_of_one_device(mesh):
    cases = {
        "multinomial": [
            run(lambda x: torch.multinomial(x, 3, replacement=True), p(5, 4)),
            run(lambda x: torch.multinomial(x, 2), p(5)),
        ],
        "exponential_": [run(lambda x: torch.zeros_like(x).exponential_(2.0), p(5, 4))],
        "geometric_": [run(lambda x: torch.zeros_like(x).geometric_(0.3), p(5, 4))],
        "log_normal_": [run(lambda x: torch.zeros_like(x).log_normal_(0.5, 0.2), p(5, 4))],
        "cauchy_": [run(lambda x: torch.zeros_like(x).cauchy_(), p(5, 4))],
    }
    assert unexpected(over_mesh(cases, placing.MESHES[mesh])) == {}
