"""Operators whose operands lie as their result will: there is no plan to search for."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardcore.adapters.torch_compat.operators import is_list_operator
from shardcore.adapters.torch_compat.trees import tree_leaves

# By the number and the shape of a result, its placements, if it has any.
_Lies = Callable[[int, Sequence[int]], tuple[Placement, ...] | None]
# What keeps each element at its place, beside the elementwise operators.
_LIKE_ITS_OPERAND = {
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.full_like.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten._to_copy.default,
}
# Of the operators on lists all but these do so too; no tag tells.
_OF_WHOLE_TENSORS = {
    "aten::_foreach_max",
    "aten::_foreach_mm",
    "aten::_foreach_norm",
    "aten::_foreach_powsum",
}


def direct_sharding(schema: OpSchema) -> OutputSharding | None:
    """The plan of an operator that needs no redistribution, where that is seen at once.

    torch 2.13: the planner lists all ways to run an operator, over each axis and each pair of them,
    prices the redistributions of every one, and then takes the one without any. That is most of
    the time of a first step: each tensor of an optimizer's lists is planned so.

    Args:
        schema: An operator and its operands.

    Returns:
        The plan; None if the planner is to be asked.
    """
    specs = _specs((schema.args_schema, schema.kwargs_schema))
    if not specs or _specs(schema.kwargs_schema) or not _has_rule(schema.op):
        return None
    mesh = specs[0].mesh
    if any(each.mesh != mesh for each in specs):
        return None
    if all(each.is_replicated() for each in specs):
        return _lying(schema, lambda _place, _shape: (Replicate(),) * mesh.ndim)
    if keeps_places(schema.op) and all(map(_is_plain, specs)):
        operands = _operands_by_result(schema)
        return _lying(schema, lambda place, shape: common_placements(operands[place], shape))
    return None


def keeps_places(operator: Any) -> bool:
    """Whether each element of a result hangs on those at its place in the operands alone."""
    if torch.Tag.pointwise in operator.tags or operator in _LIKE_ITS_OPERAND:
        return True
    return is_list_operator(operator) and operator._schema.name not in _OF_WHOLE_TENSORS


def common_placements(
    operands: Sequence[DTensorSpec], shape: Sequence[int]
) -> tuple[Placement, ...] | None:
    """How the result of an elementwise operator lies, if all operands lie so.

    Args:
        operands: The operands, split or replicated.
        shape: The shape of the result, to which they are broadcast.

    Returns:
        By axis, its placement; None if an operand would have to be redistributed.
    """
    found: list[Placement] = []
    for along in zip(*(each.placements for each in operands), strict=True):
        # Dims are counted from the end, as for broadcasting.
        dims = {
            p.dim - s.ndim for p, s in zip(along, operands, strict=True) if isinstance(p, Shard)
        }
        if not dims:
            found.append(Replicate())
            continue
        dim, *others = dims
        has_all = [s.ndim >= -dim and s.shape[dim] == shape[dim] for s in operands]
        if others or has_all != [isinstance(placement, Shard) for placement in along]:
            return None
        found.append(Shard(dim + len(shape)))
    return tuple(found)


def _operands_by_result(schema: OpSchema) -> list[list[DTensorSpec]]:
    """What each result hangs on: of lists, the tensors at its place, and those in no list."""
    lists = [
        each for each in schema.args_schema if isinstance(each, (list, tuple)) and _specs(each)
    ]
    single = [each for each in schema.args_schema if isinstance(each, DTensorSpec)]
    if not lists:
        return [single]
    return [[*each, *single] for each in zip(*lists, strict=True)]


def _lying(schema: OpSchema, lies: _Lies) -> OutputSharding | None:
    """The plan without a redistribution, if all results have placements then.

    Args:
        schema: An operator and its operands.
        lies: Gives the placements of a result, by its number and its shape; None if it has none.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    try:
        meta = propagator._propagate_tensor_meta_non_cached(schema)
    except Exception:  # noqa: BLE001 - whatever it is: the planner meets it too, and tells the user
        return None
    if meta is None:
        # What gives a number is not ours to plan. Lists that are written in place are not returned.
        written = [] if schema.op._schema.returns else _specs(schema.args_schema[0])
        found = [lies(place, each.shape) for place, each in enumerate(written)]
        return OutputSharding(None) if found and None not in found else None
    mesh = _specs(schema.args_schema)[0].mesh
    results: list[DTensorSpec | None] = []
    for place, each in enumerate([meta] if isinstance(meta, TensorMeta) else meta):
        placements = None if each is None else lies(place, each.shape)
        if each is not None and placements is None:
            return None
        spec = None if placements is None else DTensorSpec(mesh, placements, tensor_meta=each)
        results.append(spec)
    return OutputSharding(results[0] if isinstance(meta, TensorMeta) else tuple(results))


def _specs(nest: Any) -> list[DTensorSpec]:
    return [each for each in tree_leaves(nest) if isinstance(each, DTensorSpec)]


def _has_rule(operator: Any) -> bool:
    """Whether torch has a rule for it. One that it takes apart first is left to it."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    tables = propagator.op_single_dim_strategy_funcs, propagator.op_strategy_funcs
    return any(operator in table for table in tables)


def _is_plain(spec: DTensorSpec) -> bool:
    """Whether it is split in torch's own order, or replicated, along each axis."""
    kinds = {type(placement) for placement in spec.placements}
    order = spec.shard_order
    in_order = order is None or DTensorSpec.is_default_device_order(order)
    return kinds <= {Shard, Replicate} and in_order
