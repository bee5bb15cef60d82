"""Strategy `zero1`: shards the variables of an optimizer over the batch axis.

Under data parallelism every rank stores every momentum in full. With `zero1` a rank stores one
shard of it and computes that shard of the update. The weight all-gathers the updated shards.
"""

from collections.abc import Iterable

from shardcore.builtin_plugins import open_dtensor, why_no_dtensor
from shardcore.domain.layouts.layout import Layout
from shardcore.ports.hookspecs import hookimpl
from shardcore.ports.strategy import NewVariable, Strategy, StrategyEntry
from shardcore.ports.types import Tensor
from shardcore.ports.world import World
from shardcore.strategies.sharded import ShardedStrategy


class Zero1(ShardedStrategy[Tensor]):
    """The strategy `dtensor`, with another storage layout for the variables of optimizers."""

    def storage(self, variable: NewVariable) -> Layout:
        """Returns the distribution's layout, shards an optimizer's variable further."""
        layout = variable.layout
        full = [dim for dim in range(layout.ndim) if not layout.dim_axes(dim)]
        axis = variable.batch_axes[-1]
        taken = any(axis in layout.dim_axes(dim) for dim in range(layout.ndim))
        if not variable.of_optimizer or taken or not full:
            return layout
        chosen = max(full, key=lambda dim: variable.shape[dim])
        spec = [
            variable.batch_axes[-1] if d == chosen else layout.spec[d] for d in range(layout.ndim)
        ]
        return Layout(layout.mesh, tuple(spec))


def _open(world: World) -> Strategy[Tensor]:
    return open_dtensor(world, Zero1)


@hookimpl
def shardcore_strategies() -> Iterable[StrategyEntry]:
    """Offers `zero1`."""
    summary = "As dtensor; optimizer variables are sharded over the batch axis (ZeRO-1)."
    return [StrategyEntry("zero1", summary, _open, why_no_dtensor)]
