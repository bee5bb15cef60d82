"""The operators of the self-check are those of plain tensors, and a wrong one is named."""

import pytest
import torch
from torch.nn import functional

from shardcore.adapters.engine import self_check
from shardcore.adapters.engine.tensor import ShardedTensor


def test_a_dozen_operators_are_right():
    assert len(self_check.OPERATORS) >= 12
    assert list(self_check.wrong_operators()) == []


def fails(x, y):
    if isinstance(x, ShardedTensor):
        raise RuntimeError("moved\nelsewhere")
    return x + y


@pytest.mark.parametrize(
    ("operator", "found"),
    [
        (lambda x, y: x + isinstance(x, ShardedTensor), "operator odd: wrong numbers"),
        (lambda x, y: x * (1 + isinstance(x, ShardedTensor)), "operator odd: wrong numbers"),
        (fails, "operator odd: RuntimeError: moved elsewhere"),
        (
            lambda x, y: torch.ones(4, requires_grad=True) * 2,
            "operator odd: its results are not sharded tensors",
        ),
    ],
    ids=["result", "gradient", "error", "kind"],
)
def test_a_wrong_operator_is_named(monkeypatch, operator, found):
    good = ("relu", lambda x, y: functional.relu(x))
    monkeypatch.setattr(self_check, "OPERATORS", (good, ("odd", operator)))
    assert list(self_check.wrong_operators()) == [found]
