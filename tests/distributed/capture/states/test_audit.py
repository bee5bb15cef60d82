"""An audited step runs eagerly in place of its program, and ends the run if they differ."""

import os
from unittest import mock

import numpy as np
import pytest
import torch

from shardcore.domain.errors import AuditError, EnvironmentProblem
from shardcore.testing import RankFailed, run_ranks
from tests.distributed.capture.steps import (
    assert_equal,
    batches,
    begin,
    calls,
    compiled,
    decoder,
    mlp,
    plain_mlp,
    state,
)


def audited(shape, interval="audit:2"):
    os.environ["SHARDCORE_CAPTURE"] = interval
    begin(shape)


def trained(build, jit, steps=9):
    """The losses and weights, and the number of steps that ran Python."""
    model, data = compiled(build, jit), batches(build, steps)
    calls.clear()
    losses = [model.train_on_batch(x, y) for x, y in data]
    return [*map(np.asarray, losses), *state(model)], len(calls)


@pytest.mark.parametrize(
    ("shape", "build"), [(None, mlp), (None, decoder), ((2, 1), plain_mlp), ((1, 2), decoder)]
)
def test_audited_steps_have_the_numbers_of_eager_ones(shape, build):
    def program(rank):
        audited(shape)
        return [trained(build, jit) for jit in (False, "auto")]

    for (eager, _), (captured, runs) in run_ranks(program, 1 if shape is None else 2, timeout=120):
        assert_equal(captured, eager)
        assert runs == 2 + 3 if build is not plain_mlp else runs > 2  # the program ran four times


def halved(x):
    return torch.clamp(x, min=0) * 0.5


def test_an_audit_names_the_operator_that_no_guard_has_seen():
    """A replaced function of torch that no code of the user names is not compared."""

    def program(rank):
        audited(None, "audit:1")
        model, data = compiled(mlp, "auto"), batches(mlp, 4)
        for x, y in data:
            model.train_on_batch(x, y)
        with mock.patch.object(torch.nn.functional, "relu", halved):
            try:
                model.train_on_batch(*data[0])
            except AuditError as error:
                return str(error)
        return ""

    ((said),) = run_ranks(program, 1)
    assert "aten.clamp" in said
    assert "aten.relu" in said
    assert "test_audit.py" in said


def test_an_audit_on_one_rank_ends_all():
    def program(rank):
        audited((2, 1), "audit:1")
        model, data = compiled(plain_mlp, "auto"), batches(plain_mlp, 5)
        for x, y in data:
            model.train_on_batch(x, y)
        if rank == 1:
            torch.nn.functional.gelu = lambda x, approximate="none": torch.tanh(x)
        model.train_on_batch(*data[0])

    with pytest.raises(RankFailed, match=r"(?s)rank 1 .*AuditError.*aten.tanh"):
        run_ranks(program, 2, timeout=60)


def test_a_wrong_variable_is_an_error_of_install():
    def program(rank):
        with pytest.raises(EnvironmentProblem, match="SHARDCORE_CAPTURE is 'often'"):
            audited(None, "often")

    run_ranks(program, 1)
