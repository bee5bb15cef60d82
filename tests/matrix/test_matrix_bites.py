"""A wrong rule turns the matrix red: what it says of operators that are run wrongly on purpose."""

import pytest
import torch

from shardcore.adapters import dtensor_trust
from shardcore.testing import run_ranks
from tests.matrix.coverage import merge
from tests.matrix.ops_cases import CASES
from tests.matrix.ops_run import run_cases
from tests.matrix.placing import MESHES

MESH = MESHES["(2,)"]
aten = torch.ops.aten


def verdicts(rank, name, planted):
    dtensor_trust.DISTRUSTED.update(planted)
    return run_cases(rank, MESH, {name: CASES[name]})


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        pytest.param("amax", aten.sum.dim_IntList, id="a reduction over no dims"),
        pytest.param("view", aten.view.dtype, id="bits of a pending sum"),
    ],
)
def test_an_operator_trusted_wrongly_is_seen(name, operator):
    def found(planted):
        return merge(run_ranks(verdicts, MESH.size, name, planted)).counts[name]["WRONG"]

    assert found({}) == 0
    assert found({operator: lambda args: False}) > 0
