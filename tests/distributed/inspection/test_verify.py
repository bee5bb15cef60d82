"""`shardcore.verify` finds what a rank stores otherwise than the layouts say."""

import pytest
import torch

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.inspection.explained import X, Y, net
from tests.distributed.programs import distribute


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_a_copy_that_differs_on_one_rank_is_found_on_all(wrong_rank):
    def program(rank):
        distribute((1, 2), {".*up/kernel": (None, "model")})
        model = net()
        right = shardcore.verify(model, (X, Y))
        if rank == wrong_rank:
            with torch.no_grad():
                model.get_layer("out").bias._value.to_local().add_(1)
        return right, shardcore.verify(model)

    for right, wrong in run_ranks(program, 2):
        assert right.ok
        assert {each.path: each.gradient_fits for each in right.variables}["net/up/kernel"] is True
        assert [each.path for each in wrong.variables if not each.stored] == ["net/out/bias"]
        assert not wrong.ok
