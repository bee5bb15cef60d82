"""Shared memory: a write or a reduction changes a tensor and its views only."""

import pytest
import torch

from shardcore.adapters.engine.dtensors import DTensors
from shardcore.adapters.engine.library import open_engine
from shardcore.domain.errors import ShardedTensorError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import Segments
from shardcore.ports.world import World
from shardcore.testing import run_ranks

MESH = Mesh((2, 1), ("data", "model"))
WHOLE, ROWS = Layout.replicated(MESH, 2), Layout(MESH, ("data", None))
SUM, AVERAGE = (Layout(MESH, (None, None), {"data": op}) for op in ("sum", "avg"))
# Of two ranks that share rows, and of one that has all columns.
SUM_OF_COLUMNS = Layout(MESH, (None, "model"), {"data": "sum"})
FACTORS = {"sum": (3, -2), "avg": (3, -1)}
VALUES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def list_of_views(x, move):
    views = x[2:], x.t()
    return x, *torch._foreach_mul(views, 3.0), *torch._foreach_add(views, views)


def base_of_a_view_is_added_to(x, move):
    turned, other = x.t(), x * 2
    x.add_(other)
    return turned * 1, x, turned.exp()


def repeated_view(x, move):
    row = x[1]
    x.mul_(2)
    repeated = row.expand(3, -1)
    x.mul_(2)
    return (repeated * 1,)


def view_after_the_sum_was_read(x, move):
    return x.exp(), x.reshape(8, 3), x.reshape(8, 3).exp()


def base_that_changes_its_shape(x, move):
    x = move(x, ROWS)
    row, column, turned = x[1], x[:, 1], x.t()
    x.t_()
    x.mul_(2)
    seen = row * 1, column * 1, turned * 1
    x.unsqueeze_(1)
    row.add_(1)
    x.squeeze_(1)
    return x, *seen, row, column, turned


def moved_twice(x, move):
    first, second = move(x, WHOLE), move(x, WHOLE)
    first.zero_()
    return second, x.exp(), move(x, ROWS)


def moved_and_written(x, move):
    moved = [move(x, layout) for layout in (SUM, AVERAGE, SUM_OF_COLUMNS, ROWS)]
    before = [each * 1 for each in moved]
    for each in moved:
        each.mul_(3)
    return x, *before, *moved


FUNCTIONS = [
    list_of_views,
    base_of_a_view_is_added_to,
    repeated_view,
    view_after_the_sum_was_read,
    base_that_changes_its_shape,
    moved_twice,
    moved_and_written,
]


def compare(rank):
    """The functions, and the layouts, of which a result differs from plain torch."""
    world = World(MESH, (0, 1), rank, "cpu")
    tensors = open_engine(world, DTensors.over, "compute", "per_use", {})
    wrong = []

    def move(x, layout):
        return x.clone() if x.mesh_layout == layout else tensors.redistribute(x, layout)

    for function in FUNCTIONS:
        expected = function(VALUES.clone(), lambda x, _: x.clone())
        for layout in (WHOLE, ROWS, SUM, AVERAGE, SUM_OF_COLUMNS):
            factors = FACTORS[layout.partial[0][1]] if layout.partial else (1, 1)
            part = VALUES[layout.slices((6, 4), rank)] * factors[rank]
            found = function(tensors.from_local(part, layout, (6, 4)), move)
            tensors.engine.end_step()  # what was reduced before is not read
            for one, other in zip(found, expected, strict=True):
                if not torch.allclose(tensors.full_tensor(one), other, rtol=1e-4, atol=1e-5):
                    wrong.append((function.__name__, str(layout)))
    return wrong


def sharded_by_two_axes(rank):
    """Views of tensors that both axes shard, of which the operators take what a part is not."""
    mesh = Mesh((2, 2), ("data", "model"))
    world = World(mesh, (0, 1, 2, 3), rank, "cpu")
    tensors = open_engine(world, DTensors.over, "compute", "per_use", {})

    def sharded(value, layout):
        return tensors.redistribute(
            tensors.shard(value, Layout.replicated(mesh, value.ndim)), layout
        )

    numbers = torch.arange(4.0)
    x = sharded(numbers, Layout(mesh, (("data", "model"),), blocks=(3,)))
    table = sharded(VALUES, Layout(mesh, ("model", "data"), blocks=(1, Segments(2))))
    found = x.expand(2, -1), *x.split([1, 3]), table[4], table[:, 3]
    expected = numbers.expand(2, -1), *numbers.split([1, 3]), VALUES[4], VALUES[:, 3]
    return [torch.equal(tensors.full_tensor(a), b) for a, b in zip(found, expected, strict=True)]


def pending_with_views(rank):
    """The error of a partial sum with a view that changes its shape; what it is without one."""
    world = World(MESH, (0, 1), rank, "cpu")
    tensors = open_engine(world, DTensors.over, "compute", "per_use", {})
    x, viewed = (tensors.from_local(VALUES.clone(), SUM, (6, 4)) for _ in range(2))
    x.t_()
    assert torch.equal(tensors.full_tensor(x), 2 * VALUES.t())
    row = viewed[1]
    with pytest.raises(ShardedTensorError, match=r"t_\(\) cannot change .* take t\(\)"):
        viewed.t_()
    return tensors.full_tensor(row)


def activations_in_place(rank):
    """Compares the values with one device; also returns the operators on full operands."""
    tensors = open_engine(World(MESH, (0, 1), rank, "cpu"), DTensors.over, "compute", "per_use", {})
    x, expected = (
        tensors.from_local(VALUES[ROWS.slices((6, 4), rank)], ROWS, (6, 4)),
        VALUES.clone(),
    )
    for each in (x, expected):
        torch.nn.functional.hardtanh_(each, -0.5, 0.75)
        torch.nn.functional.hardswish(each, inplace=True)
    return torch.equal(tensors.full_tensor(x), expected), dict(tensors.engine.fallbacks)


def test_activations_that_torch_does_not_tag_write_into_the_shards():
    assert run_ranks(activations_in_place, 2) == [(True, {})] * 2


def test_a_pending_sum_with_views_keeps_its_shape():
    assert all(torch.equal(found, 2 * VALUES[1]) for found in run_ranks(pending_with_views, 2))


def test_views_of_tensors_sharded_over_two_axes_have_the_values_of_one_device():
    assert run_ranks(sharded_by_two_axes, 4) == [[True] * 5] * 4


def test_a_write_or_a_reduction_changes_a_tensor_and_its_views_only():
    assert run_ranks(compare, 2) == [[], []]


def written_by_numpy(rank):
    """The values of tensors after NumPy has written into their arrays, which no counter sees."""
    tensors = open_engine(World(MESH, (0, 1), rank, "cpu"), DTensors.over, "compute", "per_use", {})
    arrays = (
        lambda x: x.numpy(),
        lambda x: x.full_tensor().numpy(),
        lambda x: tensors.full_tensor(x).numpy(),
    )
    kept = []
    for layout in (ROWS, SUM):
        factors = FACTORS["sum"] if layout.partial else (1, 1)
        part = VALUES[layout.slices((6, 4), rank)] * factors[rank]
        for array in arrays:
            x = tensors.from_local(part, layout, (6, 4))
            for _ in range(2):
                array(x)[:] = 7.0
            kept.append(torch.allclose(tensors.full_tensor(x * x), VALUES * VALUES, atol=1e-5))
            kept.append(torch.allclose(tensors.full_tensor(x), VALUES, atol=1e-5))
    return kept


def test_an_array_of_a_gathered_tensor_is_a_copy():
    assert run_ranks(written_by_numpy, 2) == [[True] * 12] * 2
