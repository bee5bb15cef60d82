"""Strategy `zero1`: what an optimizer keeps is split over the batch axis; weights stay as ruled.

Under data parallelism every rank keeps every momentum, though they are all alike. Here each rank
keeps its part and computes that part of the update; the weight gathers the parts as it is updated.
"""

from collections.abc import Iterable

from shardcore.builtin_plugins import open_dtensor, why_no_dtensor
from shardcore.domain.layout import Layout
from shardcore.ports.hookspecs import hookimpl
from shardcore.ports.strategy import NewVariable, Strategy, StrategyEntry
from shardcore.ports.world import World
from shardcore.strategies.sharded import ShardedStrategy


class Zero1(ShardedStrategy):
    """The strategy `dtensor`, but for where the variables of optimizers are kept."""

    def storage(self, variable: NewVariable) -> Layout:
        """The distribution's layout; of an optimizer's variable the largest whole dim is split."""
        layout = variable.layout
        whole = [dim for dim in range(layout.ndim) if not layout.dim_axes(dim)]
        taken = any(variable.batch_axis in layout.dim_axes(dim) for dim in range(layout.ndim))
        if not variable.of_optimizer or taken or not whole:
            return layout
        split = max(whole, key=lambda dim: variable.shape[dim])
        spec = [variable.batch_axis if d == split else layout.spec[d] for d in range(layout.ndim)]
        return Layout(layout.mesh, tuple(spec))


def _open(world: World) -> Strategy:
    return open_dtensor(world, Zero1)


@hookimpl
def shardcore_strategies() -> Iterable[StrategyEntry]:
    """`zero1`."""
    summary = "As dtensor; optimizer variables are split over the batch axis (ZeRO-1)."
    return [StrategyEntry("zero1", summary, _open, why_no_dtensor)]
