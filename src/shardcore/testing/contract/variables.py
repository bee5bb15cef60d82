"""The promises of the methods: a variable is created, stored, read and assigned."""

from collections.abc import Iterator

import attrs
import numpy as np
import torch

from shardcore.domain.layouts.layout import Layout
from shardcore.ports.strategy import NewVariable, Strategy
from shardcore.ports.world import World
from shardcore.testing import count_collectives
from shardcore.testing.contract.meshes import OnMeshes, on_mesh

# Specs for every mesh; an axis of one rank shards nothing.
SPECS = (
    (None, None),
    ("data", None),
    (None, "model"),
    ("model", "data"),
    (("data", "model"), None),
    (None, ("data", "model")),
)
EVEN = torch.arange(96, dtype=torch.float32).reshape(8, 12)
# Two ranks hold 4 and 3 of 7 rows; of one row the second rank holds none.
UNEVEN = (EVEN[:7, :5], EVEN[:3, :3], EVEN[:1, :1])


@attrs.frozen
class Case:
    """A variable on this rank."""

    strategy: Strategy[torch.Tensor]
    world: World  # the mesh as this rank sees it
    full: torch.Tensor  # the initial value
    layout: Layout  # the storage layout

    def stored(self) -> torch.nn.Parameter:
        """Creates the variable as Keras does, from a copy of `full`."""
        return torch.nn.Parameter(self.created(self.full.clone()))

    def created(self, value: torch.Tensor) -> torch.Tensor:
        """Creates the strategy's tensor for `value`, as that of a weight."""
        new = NewVariable("weight", tuple(value.shape), self.layout, ("data",), of_optimizer=False)
        return self.strategy.create(value, self.layout, new)

    def part(self, full: torch.Tensor) -> torch.Tensor:
        """Slices out the part of a full tensor that this rank must store."""
        return full[self.layout.slices(full.shape, self.world.position)]

    def check(self, tensor: torch.Tensor, full: torch.Tensor) -> None:
        """Checks that `tensor` has the value `full`, and this rank only its part."""
        assert tuple(tensor.shape) == tuple(full.shape), (
            f"{self.layout}: a tensor has its global shape {tuple(full.shape)}, got "
            f"{tuple(tensor.shape)}"
        )
        local = self.strategy.to_local(tensor.detach())
        self._equal(local, self.part(full), "what this rank stores")
        self._equal(self.strategy.full_tensor(tensor), full, "the full value")

    def _equal(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        _equal(actual, expected, f"{what} of a tensor kept as {self.layout}")


def _equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    np.testing.assert_array_equal(actual.cpu(), expected.cpu(), what)


def cases(
    strategy: Strategy[torch.Tensor], world: World, *full_values: torch.Tensor
) -> Iterator[Case]:
    """Yields every value in every layout, on the device of the ranks."""
    for full in full_values:
        for spec in SPECS:
            yield Case(strategy, world, full.to(world.device_type), Layout(world.mesh, spec))


def is_created(strategy: Strategy[torch.Tensor], world: World) -> None:
    """Checks that `create` keeps dtype and value, full or joined; each rank has its part."""
    for case in cases(strategy, world, EVEN, EVEN.to(torch.int64), EVEN > 40):
        created = case.created(case.full.clone())
        assert created.dtype == case.full.dtype, f"{created.dtype} is not {case.full.dtype}"
        case.check(created, case.full)
        part, shape = case.part(case.full).clone(), tuple(case.full.shape)
        joined = strategy.from_local(part, case.layout, shape)
        case.check(case.created(joined), case.full)
    scalar = torch.tensor(3.0, device=world.device_type)
    number = Case(strategy, world, scalar, Layout(world.mesh, ()))
    number.check(number.created(scalar.clone()), scalar)


def stores_its_part(strategy: Strategy[torch.Tensor], world: World) -> None:
    """Checks that the storage of a value that `create` gives is no larger than the part."""
    for case in cases(strategy, world, EVEN, *UNEVEN):
        local = strategy.to_local(case.stored().detach())
        stored, part = local.untyped_storage().nbytes(), case.part(case.full)
        assert stored <= part.nbytes, (
            f"a rank stores {part.nbytes} bytes of shape {tuple(case.full.shape)} kept as "
            f"{case.layout}, got a storage of {stored}"
        )


def knows_its_layout(strategy: Strategy[torch.Tensor], world: World) -> None:
    """Checks that `owns` and `layout` agree; a tensor that several ranks shard is not plain."""
    for case in cases(strategy, world, EVEN, *UNEVEN):
        tensor = case.stored()
        layout = strategy.layout(tensor)
        assert strategy.owns(tensor) == (layout is not None), "owns() and layout() must agree"
        assert layout in (case.layout, None), f"kept as {case.layout}, layout() says {layout}"
        assert layout is not None or world.mesh.size == 1, "on several ranks a part is not plain"
    assert not strategy.owns(EVEN), "owns() is False for a plain tensor"
    assert strategy.layout(EVEN) is None, "a plain tensor has no layout"


def is_read(strategy: Strategy[torch.Tensor], world: World) -> None:
    """Checks that `full_tensor` all-gathers, `local` shares memory, and plain tensors mix in."""
    for case in cases(strategy, world, EVEN):
        stored = case.stored()
        full = strategy.full_tensor(stored)
        assert not strategy.owns(full), "full_tensor() gives a plain tensor"
        assert not full.requires_grad, "full_tensor() gives a detached tensor"
        result = strategy.full_tensor(stored * 2 + torch.ones_like(case.full[0]))
        _equal(result, case.full * 2 + 1, f"computed with {case.layout}")
        strategy.to_local(stored.detach()).zero_()
        case.check(stored, torch.zeros_like(case.full))
    _equal(strategy.full_tensor(EVEN), EVEN, "full_tensor() of a plain tensor")


def is_assigned(strategy: Strategy[torch.Tensor], world: World) -> None:
    """Checks that `assign` takes a value in any layout, and overwrites in place."""
    for case in cases(strategy, world, EVEN, *UNEVEN):
        stored = case.stored()
        memory = strategy.to_local(stored.detach()).data_ptr()
        values = [case.full + 1]
        values += [
            attrs.evolve(case, layout=Layout(world.mesh, spec)).created(case.full + number)
            for number, spec in enumerate(SPECS, 2)
        ]
        for number, value in enumerate(values, 1):
            with torch.no_grad():
                strategy.assign(stored, value)
            case.check(stored, case.full + number)
        assert strategy.to_local(stored.detach()).data_ptr() == memory, "assign() is in place"


def joins_parts(strategy: Strategy[torch.Tensor], world: World) -> None:
    """Checks that `from_local` makes one tensor of the ranks' parts, with uneven rows too."""
    for case in cases(strategy, world, EVEN, UNEVEN[0]):
        joined = strategy.from_local(
            case.part(case.full).clone(), case.layout, tuple(case.full.shape)
        )
        case.check(joined, case.full)


def moves_activations(strategy: Strategy[torch.Tensor], world: World) -> None:
    """Checks that `redistribute` moves to any layout; without one it reduces partial sums."""
    at = world.mesh.coordinate(world.position)[0]
    ranks = world.mesh.axis_size("data")
    pending = Layout(world.mesh, (None, None), {"data": "sum"})
    own = EVEN.to(world.device_type)
    total = own * sum(range(1, ranks + 1))
    replicated = Case(strategy, world, total, Layout.replicated(world.mesh, 2))
    for case in cases(strategy, world, total):
        tensors = [
            total,
            replicated.stored().detach(),
            strategy.from_local(own * (at + 1), pending, tuple(own.shape)),
        ]
        for tensor in tensors:
            case.check(strategy.redistribute(tensor, case.layout), total)
    summed = strategy.redistribute(
        strategy.from_local(own * (at + 1), pending, tuple(own.shape)), None
    )
    replicated.check(summed, total)


def moves_nothing(strategy: Strategy[torch.Tensor], world: World) -> None:
    """Checks that the methods that one rank alone may call start no collective."""
    with count_collectives() as traffic:
        for case in cases(strategy, world, EVEN):
            stored = case.stored()
            strategy.from_local(case.part(case.full), case.layout, tuple(case.full.shape))
            strategy.to_local(stored), strategy.owns(stored), strategy.layout(stored)
            with torch.no_grad():
                strategy.assign(stored, case.full)
    assert not traffic.calls, f"these need no other rank, but moved {dict(traffic.calls)}"


def shards_unevenly(strategy: Strategy[torch.Tensor], world: World) -> None:
    """Checks that a rank may hold fewer rows than another, or none."""
    for case in cases(strategy, world, *UNEVEN):
        case.check(case.stored(), case.full)


EVERY = (
    is_created, stores_its_part, knows_its_layout, is_read, is_assigned, joins_parts,
    moves_activations, moves_nothing,
)  # fmt: skip


class VariablePromises(OnMeshes):
    """The promises of a strategy's methods, each tried on a mesh of two ranks, all on more."""

    test_a_variable_is_created_as_its_layout_says = on_mesh((1, 2), is_created)
    test_a_rank_stores_its_part_and_nothing_else = on_mesh((2, 1), stores_its_part)
    test_a_tensor_knows_its_layout = on_mesh((1, 2), knows_its_layout)
    test_a_variable_is_read_whole_on_every_rank = on_mesh((1, 2), is_read)
    test_a_variable_is_assigned_in_place_on_every_rank = on_mesh((1, 2), is_assigned)
    test_uneven_dims_fall_as_the_layout_says = on_mesh((2, 1), shards_unevenly)
    test_parts_are_joined_without_being_moved = on_mesh((2, 1), joins_parts)
    test_an_activation_is_brought_into_a_layout = on_mesh((2, 1), moves_activations)
    test_what_one_rank_can_do_alone_starts_no_collective = on_mesh((1, 2), moves_nothing)
    test_one_rank_keeps_every_promise = on_mesh((1, 1), *EVERY)
    test_four_ranks_keep_every_promise = on_mesh((2, 2), *EVERY)
