"""Policy `expert_parallel`: every rank holds some experts, and tokens are sent to them.

The axis that shards experts shards the batch too, so that all other layers compute as in data
parallelism. Where tokens that are sharded by groups meet experts, the planner exchanges the tokens
by an all-to-all, and back behind them (`domain.engine.call.Call.separate`). A gradient of
an expert is complete on its rank, and is summed over the other axes of the batch only.
"""

from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies.data_parallel import plan_fully_sharded
from shardcore.policies.linear import Bank, bank_of, einsum_bank
from shardcore.policies.specs import SMALL, all_replicated, sharded
from shardcore.ports.policy import Choice, LayerFacts

# The number of axes, from the first, that shard the batch.
BATCH_NDIM = 2


def plan(
    model: LayerFacts,
    mesh: Mesh,
    *,
    axis: str | None = None,
    shard: str | None = None,
    small: int = SMALL,
) -> dict[str, Choice]:
    """Shards experts over an axis of the batch; other variables are replicated.

    Args:
        model: The model.
        mesh: The mesh. Its first two axes shard the batch.
        axis: The axis that shards experts: by default the last axis of the batch that has several
            ranks.
        shard: The axis that shards the other large variables, as `fully_sharded` does; by default
            none.
        small: A bank of experts of fewer bytes than this is replicated, as is a variable whose
            sharded over `shard` saves fewer.

    Raises:
        PolicyError: If the axis does not shard the batch, or the model has no experts.
    """
    rows = mesh.axis_names[:BATCH_NDIM]
    name = _last_axis_of_several(mesh, rows) if axis is None else axis
    mesh.axis_index(name)
    if name not in rows:
        raise PolicyError(
            f"Policy 'expert_parallel' shards experts over an axis that shards the batch: expected "
            f"axis= one of {list(rows)}, got {axis!r}. Put it first or second in the mesh, or take "
            "policy 'tensor_parallel', which shards experts over an axis of the model.",
            got=repr(axis),
        )
    banks = [bank for layer in model.layers() if (bank := bank_of(layer) or einsum_bank(layer))]
    if not banks:
        raise PolicyError(
            "Policy 'expert_parallel' finds no experts in the model: no layer that has kernels "
            "(experts, in, out) and (experts, hidden, in), and no EinsumDense such as "
            "'gecd,edh->gech'. Take another policy, or add rules for the experts to its plan."
        )
    summed = " and ".join(map(repr, rows))
    variables = model.all_variables()
    chosen = (
        all_replicated(variables, f"gradients are summed over {summed}")
        if shard is None
        else plan_fully_sharded(model, mesh, axis=shard, small=small)
    )
    for bank in banks:
        chosen |= _experts(bank, mesh, name, small)
    return chosen


def _last_axis_of_several(mesh: Mesh, axes: tuple[str, ...]) -> str:
    """Finds the last of `axes` that has several ranks, the last one if none has."""
    return next((axis for axis in reversed(axes) if mesh.axis_size(axis) > 1), axes[-1])


def _experts(bank: Bank, mesh: Mesh, axis: str, small: int) -> dict[str, Choice]:
    parts, experts = mesh.axis_size(axis), bank.experts
    if parts == 1:
        return all_replicated(bank.variables, f"axis {axis!r} has one rank")
    if bank.bytes < small:
        why = f"the bank has {bank.bytes} bytes, fewer than small={small}"
        return all_replicated(bank.variables, why)
    if experts < parts:
        why = f"{experts} experts are fewer than the {parts} ranks along {axis!r}"
        return all_replicated(bank.variables, why)
    uneven = ", unevenly" if experts % parts else ""
    reason = f"experts{uneven}: a rank computes its own, tokens are exchanged over {axis!r}"
    return {
        variable.path: Choice(sharded(variable, 0, axis), reason) for variable in bank.variables
    }
