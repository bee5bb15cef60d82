"""Updates that read nothing on the host: branches, fused updates, factors."""

import itertools

import pytest
import torch
from torch.optim.adam import adam
from torch.utils._python_dispatch import TorchDispatchMode

from shardcore.adapters.engine.update_on_device import update_on_device


class Operators(TorchDispatchMode):
    """Notes the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def truth(value):
    return torch.tensor(value)


@pytest.mark.parametrize(("outer", "inner"), [*itertools.product((False, True), repeat=2)])
def test_a_branch_in_a_branch_is_taken_if_both_predicates_are_true(outer, inner):
    both, before, after = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    with update_on_device() as update, update.where(truth(outer)):
        before[0] = 3  # a view
        before += 1
        both += torch.nan
        with update.where(truth(inner)):
            both.fill_(5)
            after[0] = 2
        with update.where(~truth(inner)):
            both.fill_(7)
        after += 1
    taken = 5.0 if inner else 7.0
    assert both.tolist() == [taken * outer] * 2
    assert before.tolist() == ([4, 1] if outer else [0, 0])
    assert after.tolist() == ([1 + 2.0 * inner, 1] if outer else [0, 0])


def update_by_adam(values, gradient):
    moments = [torch.zeros(2)], [torch.zeros(2)]
    count = [torch.tensor(0.0)]
    options = {"beta1": 0.9, "beta2": 0.9, "lr": 0.1, "weight_decay": 0.0, "eps": 1e-7}
    adam(
        *([values], [gradient], *moments, [], count),
        **{"fused": True, "amsgrad": False, "maximize": False, **options},
    )
    return moments


def test_a_fused_update_that_is_not_taken_does_nothing_and_copies_nothing():
    values, gradient = torch.ones(2), torch.tensor([torch.inf, 1.0])
    with Operators() as operators, update_on_device() as update, update.where(truth(False)):
        (first,), (second,) = update_by_adam(values, gradient)
    assert [each.tolist() for each in (values, first, second)] == [[1, 1], [0, 0], [0, 0]]
    assert operators.names.count("aten::clone") == 1  # of the count of steps
    with update_on_device() as update, update.where(truth(True)):
        update_by_adam(values, torch.ones(2))
    assert values.tolist() != [1, 1]


@pytest.mark.parametrize("name", ["add", "sub"])
def test_a_factor_in_a_tensor_is_read_by_no_host(name):
    x, y, factor = torch.ones(3), torch.arange(3.0), torch.tensor(0.5)
    of_one, of_list = getattr(torch, name), getattr(torch, f"_foreach_{name}")
    expected = of_one(x, y, alpha=0.5)
    with Operators() as operators, update_on_device():
        found = of_one(x, y, alpha=factor), of_list([x], [y], alpha=factor)[0]
        reverse = torch.rsub(y, x, alpha=0.5)
    assert all(torch.equal(each, expected) for each in found)
    assert torch.equal(reverse, torch.rsub(y, x, alpha=0.5))
    assert not {"aten::item", "aten::_local_scalar_dense"} & set(operators.names)
