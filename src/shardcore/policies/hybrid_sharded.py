"""Policy `hybrid_sharded`: shards inside each group of ranks, and equal groups as replicas.

The mesh is `(replica, shard, model)`, or `(replica, shard)`: a group of ranks that are near each
other, such as those of a host, holds a model in shards. A gradient is reduce-scattered inside the
group, and its shards are all-reduced across groups. With a model axis `tensor_parallel` shards
kernels over it first. The batch is sharded over `("replica", "shard")`.
"""

from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies import fully_sharded, tensor_parallel
from shardcore.policies.specs import SMALL, all_replicated
from shardcore.ports.model import LayerFacts, VariableFacts
from shardcore.ports.policy import Choice


def plan(
    model: LayerFacts, mesh: Mesh, *, shard: str | None = None, small: int = SMALL
) -> dict[str, Choice]:
    """Shards kernels over an axis behind `shard`, then every large variable over `shard`.

    Args:
        model: The model.
        mesh: The mesh.
        shard: The axis that shards variables, by default the second.
        small: A variable is sharded over `shard` if that saves every rank this many bytes, and a
            part of the model over the last axis if it has as many.

    Raises:
        PolicyError: If the mesh has fewer than two axes, or the axis is the first.
    """
    if mesh.ndim < 2 or shard == mesh.axis_names[0]:
        raise PolicyError(
            f"Policy 'hybrid_sharded' needs an axis of replicas and behind it one of shards, and "
            f"got mesh {mesh}, shard={shard!r}: make it DeviceMesh((hosts, ranks of a host), "
            "('replica', 'shard')), or take policy 'fully_sharded'.",
            name="shard",
            got=repr(shard),
        )
    name = mesh.axis_names[1] if shard is None else shard
    behind = mesh.axis_names[mesh.axis_index(name) + 1 :]
    variables = model.all_variables()
    chosen = (
        tensor_parallel.plan(model, mesh, axis=behind[-1], small=small)
        if behind
        else all_replicated(variables, "no axis of the model")
    )
    return {
        variable.path: _shard_further(variable, chosen[variable.path], mesh, name, small)
        for variable in variables
    }


def _shard_further(
    variable: VariableFacts, before: Choice, mesh: Mesh, axis: str, small: int
) -> Choice:
    """Returns the choice of `tensor_parallel` with one more dim sharded; its reason comes first."""
    choice = fully_sharded.shard_further(variable, before.spec, mesh, axis, small)
    return Choice(choice.spec, f"{before.reason}; {choice.reason}") if any(before.spec) else choice
