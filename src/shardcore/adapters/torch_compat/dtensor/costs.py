"""What the planner thinks that a redistribution costs, without a search for the best way."""

from typing import Any

from torch.distributed.tensor import _collective_utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor.placement_types import _StridedShard

_PLANNER: Any = utils
_TORCHS: Any = _collective_utils.redistribute_cost


def replace_costs() -> None:
    """Make the planner estimate.

    torch 2.13: to compare the ways of running an operator it searches, for each and for each new
    shape, the cheapest path between two placements, as soon as one is a `_StridedShard` or in an
    order of its own: what a reshape of split dims leaves, as in every einsum of an attention. An
    operator then takes a second to plan. The redistribution itself still searches, once.
    """
    _PLANNER.redistribute_cost = _estimate


def restore_costs() -> None:
    """Let the planner search again."""
    _PLANNER.redistribute_cost = _TORCHS


def _estimate(current: DTensorSpec, target: DTensorSpec) -> float:
    """The sum of the axes, each on its own, where torch would search."""
    if current.mesh != target.mesh or not (_is_searched(current) or _is_searched(target)):
        return float(_TORCHS(current, target))
    if current.is_replicated() or current.placements == target.placements:
        return 0.0
    topology = _collective_utils.MeshTopoInfo.build_from_mesh(current.mesh)
    size = _collective_utils.spec_to_bytes(current) / current.num_shards / 2**30
    total = 0.0
    for axis, (before, after) in enumerate(zip(current.placements, target.placements, strict=True)):
        cost, size = _collective_utils._compute_placement_transition_cost(
            before, after, topology, axis, size
        )
        total += cost
    return total


def _is_searched(spec: DTensorSpec) -> bool:
    if any(isinstance(placement, _StridedShard) for placement in spec.placements):
        return True
    order = spec.shard_order
    return order is not None and not DTensorSpec.is_default_device_order(order)
