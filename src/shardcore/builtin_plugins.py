"""The built-in strategies and policies, offered by the same hooks as those of plug-ins."""

import importlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from shardcore.domain.cost.collective_cost import Link
from shardcore.policies import (
    context_parallel,
    data_parallel,
    expert_parallel,
    per_layer,
    sequence_parallel,
    tensor_parallel,
)
from shardcore.ports.hookspecs import hookimpl
from shardcore.ports.policy import PolicyEntry
from shardcore.ports.strategy import Strategy, StrategyEntry
from shardcore.ports.world import World
from shardcore.strategies.sharded import ShardedStrategy
from shardcore.strategies.single_device import SingleDeviceStrategy

Weights: TypeAlias = Literal["compute", "gather"]
Gathered: TypeAlias = Literal["per_use", "per_step"]


def open_dtensor(
    world: World,
    kind: type[ShardedStrategy[Any]] = ShardedStrategy,
    *,
    weights: Weights = "compute",
    gathered: Gathered = "per_use",
    links: Mapping[str, Link] = MappingProxyType({}),
) -> Strategy[Any]:
    """Opens the strategy `dtensor` on `world`; on one device it is `single`.

    Args:
        world: The mesh over the processes of the job.
        kind: The class of the strategy; a plug-in passes a subclass.
        weights: The use of a weight that is sharded over a model axis: "compute" with its shards,
            if that is cheaper, or "gather" it for each use.
        gathered: The lifetime of an all-gathered weight: "per_use" or "per_step".
        links: By mesh axis, the latency and the bandwidth of its link, if the default is wrong.
    """
    if world.mesh.size == 1:  # one device has nothing to shard, and plain tensors are faster
        return SingleDeviceStrategy(world)
    from shardcore.adapters.engine.dtensors import DTensors
    from shardcore.adapters.engine.library import open_engine

    return kind(open_engine(world, DTensors.over, weights, gathered, links))


def _open_manual(
    world: World,
    *,
    weights: Weights = "compute",
    gathered: Gathered = "per_use",
    links: Mapping[str, Link] = MappingProxyType({}),
) -> Strategy[Any]:
    if world.mesh.size == 1:
        return SingleDeviceStrategy(world)
    from shardcore.adapters.engine.library import open_engine
    from shardcore.adapters.engine.local_shards import LocalShards

    return ShardedStrategy(open_engine(world, LocalShards.over, weights, gathered, links))


def why_no_dtensor() -> str | None:
    """Explains why `dtensor` is not available, with the remedy; None if it is."""
    reason = why_no_distributed()
    if reason is None:
        try:
            importlib.import_module("torch.distributed.tensor")
        except ImportError as error:
            return f"DTensor is not available: {error}. Install a torch that has it."
    return reason


def why_no_distributed() -> str | None:
    """Explains why `manual` is not available, with the remedy; None if it is."""
    try:
        if importlib.import_module("torch.distributed").is_available():
            return None
    except ImportError as error:
        return f"torch cannot be imported: {error}. Install it: pip install torch."
    return "This torch was built without torch.distributed: install one that has it."


@hookimpl
def shardcore_strategies() -> Iterable[StrategyEntry]:
    """Offers `dtensor`, `manual` and `single`."""
    return [
        StrategyEntry(
            "dtensor",
            "Variables are DTensors; the engine runs their operators.",
            open_dtensor,
            why_no_dtensor,
            preference=100,
        ),
        StrategyEntry(
            "manual",
            "The same engine, without torch.distributed.tensor.",
            _open_manual,
            why_no_distributed,
            preference=50,
        ),
        StrategyEntry(
            "single",
            "One device stores every full tensor.",
            SingleDeviceStrategy,
            preference=0,
            serves_one_device=True,
        ),
    ]


@hookimpl
def shardcore_policies() -> Iterable[PolicyEntry]:
    """Offers the policies of the package `policies`."""
    return [
        PolicyEntry(
            "data_parallel",
            "Replicates every variable; each rank computes its rows.",
            data_parallel.plan,
        ),
        PolicyEntry(
            "fully_sharded",
            "Shards variables over the batch axis where that pays.",
            data_parallel.plan_fully_sharded,
        ),
        PolicyEntry(
            "hybrid_sharded",
            "Shards variables inside each group of ranks, such as a host.",
            data_parallel.plan_hybrid_sharded,
            batch_ndim=2,
        ),
        PolicyEntry(
            "tensor_parallel",
            "Shards layers, heads, embeddings over the model axis.",
            tensor_parallel.plan,
        ),
        PolicyEntry(
            "sequence_parallel",
            "As tensor_parallel; norms compute parts of the sequence.",
            sequence_parallel.plan,
        ),
        PolicyEntry(
            "context_parallel",
            "Shards sequences everywhere; attention runs in a ring.",
            context_parallel.plan,
        ),
        PolicyEntry(
            "expert_parallel",
            "Shards experts over an axis of the batch; tokens are sent to them.",
            expert_parallel.plan,
            batch_ndim=expert_parallel.BATCH_NDIM,
        ),
        PolicyEntry(
            per_layer.NAME,
            "Lays out each layer by the policy that is given for it.",
            per_layer.plan,
            batch_ndim=per_layer.BATCH_NDIM,
        ),
    ]
