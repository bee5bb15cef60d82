"""What the promises have in common: a strategy by its name, and ranks to try it on."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

from shardcore.bootstrap import plugins
from shardcore.domain.errors import ShardcoreError
from shardcore.domain.mesh import Mesh
from shardcore.ports import contract
from shardcore.ports.strategy import Strategy, StrategyEntry
from shardcore.ports.world import World
from shardcore.testing.ranks import run_ranks

AXES = ("data", "model")
Shape = tuple[int, int]


def world_of(shape: Shape, rank: int) -> World:
    """A mesh of `shape` over as many processes, as process `rank` sees it."""
    return World(Mesh(shape, AXES), tuple(range(math.prod(shape))), rank, "cpu")


class OnMeshes:
    """A strategy under test, and where its promises are tried."""

    strategy: ClassVar[str]
    several_ranks: ClassVar[bool] = True

    def entry(self) -> StrategyEntry:
        """Returns the strategy as its package offers it."""
        return plugins.choose(self.strategy, plugins.offered(plugins.STRATEGIES))[0]

    def on_mesh(self, shape: Shape, promise: Callable[[Strategy[Any], World], None]) -> None:
        """Try a promise on every rank of a mesh, inside the scopes in which Keras calls."""
        entry = self.entry()

        def on_rank(rank: int) -> None:
            world = world_of(shape, rank)
            strategy = contract.opened(entry, world)
            with strategy.scope():
                promise(strategy, world)

        if self.serves(shape):
            run_ranks(on_rank, math.prod(shape))

    def serves(self, shape: Shape) -> bool:
        """Returns whether the mesh is served; if not, the strategy must say so when it is opened.

        Raises:
            AssertionError: If a mesh that is not served is not refused.
        """
        if self.several_ranks or math.prod(shape) == 1:
            return True
        mesh, entry = world_of(shape, 0).mesh, self.entry()

        def refused(rank: int) -> str | None:
            try:
                contract.opened(entry, world_of(shape, rank))
            except ShardcoreError as error:
                return str(error)
            return None

        for refusal in run_ranks(refused, math.prod(shape)):
            assert refusal is not None, (
                f"strategy {self.strategy!r} has several_ranks = False, so opening it on mesh "
                f"{mesh} must raise a StrategyError, but it was opened"
            )
            told = repr(self.strategy) in refusal and str(mesh) in refusal
            assert told, f"the refusal must name the strategy and mesh {mesh}, got: {refusal}"
        return False
