"""shardcore's own strategies, offered by the same hook as anybody else's."""

from collections.abc import Iterable

from shardcore.ports.hookspecs import hookimpl
from shardcore.ports.strategy import Strategy, StrategyEntry
from shardcore.ports.world import World


def _open_dtensor(world: World) -> Strategy:
    if world.mesh.size == 1:  # one device has nothing to shard, and plain tensors are faster
        return _open_single(world)
    from shardcore.adapters.dtensor import DTensors
    from shardcore.strategies.dtensor import DTensorStrategy

    return DTensorStrategy(DTensors(world))


def _why_no_dtensor() -> str | None:
    from shardcore.adapters.availability import why_no_dtensor

    return why_no_dtensor()


def _open_single(world: World) -> Strategy:
    from shardcore.strategies.single_device import SingleDeviceStrategy

    return SingleDeviceStrategy(world)


@hookimpl
def shardcore_strategies() -> Iterable[StrategyEntry]:
    """`dtensor` and `single`."""
    return [
        StrategyEntry(
            "dtensor",
            "Variables are DTensors; torch.distributed.tensor computes with their layouts.",
            _open_dtensor,
            _why_no_dtensor,
            preference=100,
        ),
        StrategyEntry(
            "single",
            "One device holds everything whole.",
            _open_single,
            preference=0,
        ),
    ]
