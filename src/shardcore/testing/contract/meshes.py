"""The strategy under test, and tests of it on the ranks of a mesh."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

from shardcore.adapters.ranks.job import devices
from shardcore.bootstrap import plugins
from shardcore.domain.errors import ShardcoreError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports import contract
from shardcore.ports.strategy import Strategy, StrategyEntry
from shardcore.ports.world import World
from shardcore.testing.ranks import run_ranks

AXES = ("data", "model")
Shape = tuple[int, int]


def world_of(shape: Shape, rank: int) -> World:
    """Describes a mesh of `shape` over as many processes, as process `rank` sees it."""
    processes = tuple(range(math.prod(shape)))
    return World(Mesh(shape, AXES), processes, rank, devices.device_type())


class OnMeshes:
    """The base of the promises: the strategy under test."""

    strategy: ClassVar[str]
    several_ranks: ClassVar[bool] = True

    def entry(self) -> StrategyEntry:
        """Looks up the strategy as its package offers it."""
        return plugins.choose(self.strategy, plugins.load().strategies)[0]

    def serves(self, shape: Shape) -> bool:
        """Tells whether the mesh is served; if not, the strategy must refuse to be opened.

        Raises:
            AssertionError: If a mesh that is not served is not refused.
        """
        if self.several_ranks or math.prod(shape) == 1:
            return True
        mesh, entry = world_of(shape, 0).mesh, self.entry()

        def refused(rank: int) -> str | None:
            try:
                contract.open_strategy(entry, world_of(shape, rank))
            except ShardcoreError as error:
                return str(error)
            return None

        for refusal in run_ranks(refused, math.prod(shape)):
            assert refusal is not None, (
                f"strategy {self.strategy!r} has several_ranks = False, so opening it on mesh "
                f"{mesh} must raise a StrategyError, but it was opened"
            )
            names_both = repr(self.strategy) in refusal and str(mesh) in refusal
            assert names_both, f"the refusal must name the strategy and mesh {mesh}, got: {refusal}"
        return False


def on_mesh(
    shape: Shape, *promises: Callable[[Strategy[Any], World], None]
) -> Callable[[OnMeshes], None]:
    """Builds the test that each rank of a mesh keeps `promises`, in the scope for Keras.

    Args:
        shape: The shape of the mesh.
        *promises: Functions that raise an AssertionError if the strategy breaks the promise.
    """

    def test(self: OnMeshes) -> None:
        entry = self.entry()

        def on_rank(rank: int) -> None:
            world = world_of(shape, rank)
            strategy = contract.open_strategy(entry, world)
            with strategy.implicit_replication():
                for promise in promises:
                    promise(strategy, world)

        if self.serves(shape):
            run_ranks(on_rank, math.prod(shape))

    return test
