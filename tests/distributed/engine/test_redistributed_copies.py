"""A gathered or reduced tensor is reused until it or its source is written."""

import torch

from shardcore.adapters.engine.dtensors import DTensors
from shardcore.adapters.engine.library import open_engine
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports.world import World
from shardcore.testing import count_collectives, run_ranks

MESH = Mesh((2,), ("model",))
COLUMNS, PENDING = Layout(MESH, (None, "model")), Layout(MESH, (None, None), {"model": "sum"})
WHOLE = Layout.replicated(MESH, 2)
VALUES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
KERNEL = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


def products(x, kernel):
    return (x @ kernel).relu() + (x @ kernel).tanh()


def written_between(x, kernel):
    before = x @ kernel
    x.mul_(2)
    return before + x @ kernel


def view_of_what_is_written(x, kernel):
    turned = x.t()
    before = kernel.t() @ turned
    x.mul_(2)
    return before + kernel.t() @ turned


def view_is_written(x, kernel):
    before = x @ kernel
    x.t().mul_(2)
    return before + x @ kernel


def reduced_view_is_written(x, kernel):
    before = x.exp()
    x.view(24).mul_(2)
    return before + x.exp()


def gradients(x, kernel):
    x = x.detach().requires_grad_()
    kernel = kernel.detach().requires_grad_()
    (x @ kernel).tanh().sum().backward()
    return x.grad @ kernel.grad


def sliced(x, kernel):
    return x[:, ::2].exp() + x[:, 1::2].tanh()


# By name: the function, and the collectives that it needs on columns, and on a partial sum.
CASES = {
    "twice": (products, {"all_gather": 1}, {"all_reduce": 1}),
    "elements": (lambda x, _: x.exp() + x.tanh(), {}, {"all_reduce": 1}),
    "slices": (sliced, {"all_gather": 1}, None),
    "written between": (written_between, {"all_gather": 2}, None),
    "view of what is written": (view_of_what_is_written, {"all_gather": 2}, None),
    "view is written": (view_is_written, {"all_gather": 2}, None),
    "reduced view is written": (reduced_view_is_written, {}, None),
    "gradients": (gradients, {"all_gather": 1}, None),
}


def compare(rank):
    """The differences from plain torch, by case and layout: values, then collectives."""
    world = World(MESH, (0, 1), rank, "cpu")
    tensors = open_engine(world, DTensors.over, "compute", "per_use", {})
    kernel = tensors.mark_weight(tensors.shard(KERNEL, WHOLE))
    wrong = {}
    for name, (function, *expected) in CASES.items():
        for layout, calls in zip((COLUMNS, PENDING), expected, strict=True):
            factor = (3, -2)[rank] if layout.partial else 1
            x = tensors.from_local(VALUES[layout.slices((6, 4), rank)] * factor, layout, (6, 4))
            with count_collectives() as counted:
                found = function(x, kernel)
            counts = dict(counted.calls)
            right = torch.allclose(
                tensors.full_tensor(found), function(VALUES.clone(), KERNEL), rtol=1e-4, atol=1e-5
            )
            if not right or calls not in (None, counts):
                wrong[name, str(layout)] = right, counts
    return wrong


def test_a_redistributed_tensor_is_reused_until_it_is_written():
    assert run_ranks(compare, 2) == [{}, {}]


def written_elsewhere(rank):
    """A product after the all-gathered tensor was written, and one after the end of a step."""
    world = World(MESH, (0, 1), rank, "cpu")
    tensors = open_engine(world, DTensors.over, "compute", "per_use", {})
    x = tensors.from_local(VALUES[COLUMNS.slices((6, 4), rank)], COLUMNS, (6, 4))
    kernel = tensors.mark_weight(tensors.shard(KERNEL, WHOLE))
    tensors.redistribute(x, WHOLE).zero_()
    kept = torch.allclose(tensors.full_tensor(x @ kernel), VALUES @ KERNEL, rtol=1e-4, atol=1e-5)
    with count_collectives() as same_step:
        x @ kernel
    with tensors.implicit_replication():
        """A step."""
    with count_collectives() as next_step:
        x @ kernel
    return kept, dict(same_step.calls), dict(next_step.calls)


def test_a_written_tensor_or_one_of_another_step_is_not_reused():
    assert run_ranks(written_elsewhere, 2) == [(True, {}, {"all_gather": 1})] * 2


def moved_while_pending(rank):
    """A product on a partial sum that moves it along the other axis, and an operator on its sum."""
    mesh = Mesh((2, 1), ("data", "model"))
    tensors = open_engine(World(mesh, (0, 1), rank, "cpu"), DTensors.over, "compute", "per_use", {})
    pending = Layout(mesh, ("model", None), {"data": "sum"})
    x = tensors.from_local(VALUES * (3, -2)[rank], pending, (6, 4))
    kernel = tensors.mark_weight(tensors.shard(VALUES.t(), Layout(mesh, ("model", None))))
    product, squares = kernel @ x, x * x
    expected = VALUES.t() @ VALUES, VALUES * VALUES
    return [
        torch.allclose(tensors.full_tensor(found), right, rtol=1e-4, atol=1e-5)
        for found, right in zip((product, squares), expected, strict=True)
    ]


def test_a_sum_that_stays_pending_while_it_is_moved_is_not_taken_for_its_value():
    assert run_ranks(moved_while_pending, 2) == [[True, True]] * 2
