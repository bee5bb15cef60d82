"""Random operators: none is left to DTensor, which draws each part for itself."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardcore.adapters.dtensor_random import HANDLERS, WRITES
from tests.matrix import placing
from tests.matrix.ops_cases import p, run
from tests.matrix.ops_run import over_mesh
from tests.matrix.suite import unexpected

# Attention of CUDA with dropout, which Keras does not ask for, and `torch.nn.RReLU`.
LEFT = {"scaled_dot_product", "rrelu_with_noise"}


def random_operators():
    """The ATen operators that draw and that DTensor has a rule for."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    ruled = {*propagator.op_strategy_funcs, *propagator.op_single_dim_strategy_funcs}
    return [
        operator
        for operator in ruled
        if torch.Tag.nondeterministic_seeded in operator.tags
        and "out" not in operator._overloadname
    ]


def test_every_random_operator_is_handled():
    left = [
        str(operator)
        for operator in random_operators()
        if operator not in {**HANDLERS, **WRITES}
        and not any(name in str(operator) for name in LEFT)
    ]
    assert len(random_operators()) > 10
    assert left == []


@pytest.mark.parametrize("mesh", placing.MESHES)
def test_what_torch_draws_is_what_one_device_draws(mesh):
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
