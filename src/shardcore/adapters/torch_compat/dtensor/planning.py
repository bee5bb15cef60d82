"""How DTensor plans an operator, and where its plan is replaced."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
)
from torch.utils import _pytree as pytree

from shardcore.adapters.torch_compat.dtensor.direct import keeps_places
from shardcore.adapters.torch_compat.dtensor.strided import cuts_alike
from shardcore.adapters.torch_compat.trees import tree_leaves
from shardcore.domain.errors import StrategyError


class NoPlanError(StrategyError, NotImplementedError):
    """An operator that DTensor cannot run on these operands, nor the fall-back on whole ones."""


def settled_schema(operator: Any, schema: OpSchema) -> OpSchema | None:
    """`schema` with its pending operands reduced, where they have to be before the operator."""
    specs = [s for s in tree_leaves(schema.args_schema) if isinstance(s, DTensorSpec)]
    if not (_gathers_for_a_sum(operator, schema, specs) or _leaves_float16(operator, specs)):
        return None
    return settled(schema)


def settled(schema: OpSchema) -> OpSchema:
    """`schema` with its pending operands reduced."""

    def settle(leaf: Any) -> Any:
        if not isinstance(leaf, DTensorSpec):
            return leaf
        placements = tuple(Replicate() if p.is_partial() else p for p in leaf.placements)
        return DTensorSpec(leaf.mesh, placements, tensor_meta=leaf.tensor_meta)

    operands = pytree.tree_map(
        settle, schema.args_schema, is_leaf=lambda leaf: isinstance(leaf, DTensorSpec)
    )
    return OpSchema(schema.op, tuple(operands), schema.kwargs_schema, schema.schema_info)


def _gathers_for_a_sum(operator: Any, schema: OpSchema, specs: list[DTensorSpec]) -> bool:
    """Whether pending operands meet others that are split over the same axes.

    torch 2.13: an elementwise operator on a batch-split activation and a pending mean is planned
    as a gather of the activation, as in a batch normalization.
    """
    if torch.Tag.pointwise not in operator.tags or schema.is_inplace_op():
        return False
    return any(
        any(p.is_partial() for p in along) and any(isinstance(p, Shard) for p in along)
        for along in zip(*(spec.placements for spec in specs), strict=True)
    )


def _leaves_float16(operator: Any, specs: list[DTensorSpec]) -> bool:
    """Whether a pending sum in float16 is cast, as a gradient under mixed precision is.

    Each rank's part may be finite where the sum overflows: loss scaling skips that step on one
    device, so it has to be seen here.
    """
    return operator is torch.ops.aten._to_copy.default and any(
        spec.tensor_meta is not None
        and spec.tensor_meta.dtype is torch.float16
        and any(p.is_partial() for p in spec.placements)
        for spec in specs
    )


def scatters_a_sum(sharding: Any, schema: OpSchema) -> bool:
    """Whether an elementwise operator would be given a pending operand scattered over an axis.

    torch 2.13: that is the cheapest for this operator, as an activation behind a row-split kernel,
    but the batch or whatever dim it takes is then split over that axis, and the next operators pay
    for it.
    """
    local = getattr(sharding, "redistribute_schema", None)
    if local is None or torch.Tag.pointwise not in schema.op.tags or schema.is_inplace_op():
        return False
    before, after = tree_leaves(schema.args_schema), tree_leaves(local.args_schema)
    return any(
        isinstance(old, DTensorSpec)
        and isinstance(new, DTensorSpec)
        and any(
            a.is_partial() and isinstance(b, Shard)
            for a, b in zip(old.placements, new.placements, strict=True)
        )
        for old, new in zip(before, after, strict=False)
    )


def after_settling(schema: OpSchema) -> OutputSharding:
    """The sharding of `schema`, whose operands have to be redistributed to be so."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    sharding = propagator.propagate_op_sharding_non_cached(schema)
    return OutputSharding(
        sharding.output_spec,
        sharding.redistribute_schema or schema,
        needs_redistribute=True,
        use_val_from_redistribute_schema=sharding.use_val_from_redistribute_schema,
    )


def is_distrusted(operator: Any, schema: OpSchema, sharding: Any) -> bool:
    """Whether to replicate first: DTensor would be wrong, torch is unknown, or a part is empty."""
    if divides_integers(sharding, schema) or _cuts_other_parts(sharding, schema):
        return True
    if keeps_places(operator):  # it runs on parts without an element as well
        return False
    if not is_known(torch.__version__):
        return True
    specs = tree_leaves((schema.args_schema, schema.kwargs_schema))
    return any(isinstance(spec, DTensorSpec) and _has_empty_part(spec) for spec in specs)


def _has_empty_part(spec: DTensorSpec) -> bool:
    sizes = list(spec.shape)
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Shard):
            parts, size = spec.mesh.size(axis), sizes[placement.dim]
            chunk = -(-size // parts)
            if chunk * (parts - 1) >= size:
                return True
            # The smallest part counts: the last one.
            sizes[placement.dim] = size - chunk * (parts - 1)
    return False


def is_known(version: str) -> bool:
    """Whether the operators of this torch have been through the matrix."""
    return version.startswith("2.13.")


@lru_cache(maxsize=1)
def warn_if_unknown(version: str) -> None:
    """Warn, once, of a torch whose operators have not been through the matrix."""
    if not is_known(version):
        logging.getLogger("shardcore.operators").warning(
            "torch %s is not known to shardcore, whose operators were checked on torch 2.13: all "
            "but elementwise ones are run on replicated operands, which is right and slow.",
            version,
        )


def divides_integers(sharding: Any, schema: OpSchema) -> bool:
    """Whether integers would be made a pending sum, which torch 2.13 does by a division."""
    local = getattr(sharding, "redistribute_schema", None)
    if local is None:
        return False
    before, after = tree_leaves(schema.args_schema), tree_leaves(local.args_schema)
    return any(
        isinstance(old, DTensorSpec)
        and isinstance(new, DTensorSpec)
        and old.tensor_meta is not None
        and not old.tensor_meta.dtype.is_floating_point
        and not old.tensor_meta.dtype.is_complex
        and any(
            a.is_replicate() and type(b) is Partial
            for a, b in zip(old.placements, new.placements, strict=True)
        )
        for old, new in zip(before, after, strict=False)
    )


def adds_integers(sharding: Any, schema: OpSchema) -> bool:
    """Whether an elementwise operator would do so, and may have the pending operand reduced."""
    is_pointwise = torch.Tag.pointwise in schema.op.tags and not schema.is_inplace_op()
    return is_pointwise and divides_integers(sharding, schema)


# Views, which DTensor plans by the factors of their dims.
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def _cuts_other_parts(sharding: Any, schema: OpSchema) -> bool:
    """Whether some rank's part of a view is not its part of what is viewed.

    torch 2.13: of several axes that split one dim only the first is looked at; and the stride of a
    `_StridedShard` stays as it is where its dim is flattened with others, or split in two.
    """
    if schema.op not in _VIEWS or not isinstance(sharding, OutputSharding):
        return False
    before: Any = (sharding.redistribute_schema or schema).args_schema[0]
    after: Any = sharding.output_spec
    return not cuts_alike(before, after)


def reshaping(sharding: Any, schema: OpSchema) -> Any:
    """A view of what this rank stores may be impossible where one of the whole is not.

    torch 2.13: a part is not always contiguous where the whole is, so that a view dies, even on
    some ranks only. As a reshape it copies there.
    """
    if schema.op not in _VIEWS or not isinstance(sharding, OutputSharding):
        return sharding
    local = sharding.redistribute_schema or schema
    return OutputSharding(
        sharding.output_spec,
        OpSchema(torch.ops.aten.reshape.default, local.args_schema, local.kwargs_schema),
        needs_redistribute=True,
        use_val_from_redistribute_schema=sharding.use_val_from_redistribute_schema,
    )


def check_target_stays(schema: OpSchema, sharding: Any) -> None:
    """An operator that writes in place leaves its target as it lies.

    torch 2.13 plans `index_add_`, `index_copy_`, `masked_fill_` and `addmv_` otherwise, where an
    operand is pending: the target would become a pending sum, or another part.

    Raises:
        NoPlanError: If it would not.
    """
    if not schema.is_inplace_op():
        return
    before, after = schema.args_schema[0], sharding.output_spec
    if not isinstance(before, DTensorSpec) or not isinstance(after, DTensorSpec):
        return
    if before.placements != after.placements:
        raise NoPlanError(
            f"{schema.op} would change its first operand from {before.placements} to "
            f"{after.placements}. If one device runs this call, gather the operands first: "
            "shardcore.all_gather(tensor, axis), or tensor.full_tensor()."
        )


def moves_first(args: tuple[Any, ...], sharding: Any) -> bool:
    """Whether the first operand is redistributed before the operator runs."""
    local = sharding.redistribute_schema
    if local is None or not isinstance(args[0], DTensor):
        return False
    return moves(args[0], local.args_schema[0].placements)


def moves(tensor: DTensor, placements: Sequence[Placement]) -> bool:
    """Whether `tensor` is copied to come into `placements`. Along an axis of one rank it is not."""
    axes = zip(tensor.device_mesh.shape, tensor.placements, placements, strict=True)
    return any(size > 1 and before != after for size, before, after in axes)


def replicated_sharding(info: Any) -> OutputSharding:
    """The sharding that replicates every operand.

    Raises:
        NoPlanError: If the operator cannot be run so, with the reason.
    """
    schema = info.schema
    if schema.is_inplace_op() or schema.is_out_variant_op():
        raise NoPlanError("it writes into an operand, which has to stay as it lies")
    if any(_is_split(value) for value in schema.kwargs_schema.values()):
        raise NoPlanError("an operand that is given by keyword is split")
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    try:
        meta = propagator._propagate_tensor_meta_non_cached(schema)
    except Exception as error:  # a fake run of any operator: whatever it raises, no shape
        raise NoPlanError(f"a run without values, for the shapes, raised: {error}") from error

    def replicate(leaf: Any) -> Any:
        return _replicated_spec(info, leaf.tensor_meta) if isinstance(leaf, DTensorSpec) else leaf

    operands = pytree.tree_map(
        replicate, schema.args_schema, is_leaf=lambda leaf: isinstance(leaf, DTensorSpec)
    )
    if meta is None or isinstance(meta, TensorMeta):
        output: Any = _replicated_spec(info, meta)
    else:
        output = type(meta)(_replicated_spec(info, each) for each in meta)
    return OutputSharding(
        output,
        OpSchema(schema.op, tuple(operands), schema.kwargs_schema),
        needs_redistribute=True,
    )


def no_plan(operator: Any, info: Any, torchs: Exception, fallback: NoPlanError) -> NoPlanError:
    """What to tell the user of an operator that neither torch nor the fall-back can plan."""
    specs = [
        f"{tuple(spec.shape)} as [{', '.join(map(str, spec.placements))}]"
        for spec in tree_leaves((info.schema.args_schema, info.schema.kwargs_schema))
        if isinstance(spec, DTensorSpec)
    ]
    reason = str(torchs).partition("\n\nSharding propagation failed")[0]
    return NoPlanError(
        f"Operator {operator} cannot be run on operands of {', '.join(specs)}. DTensor: {reason}. "
        f"The fall-back, to run it on whole operands, was tried too: {fallback}. If one device "
        "runs this call, gather the operands first: shardcore.all_gather(tensor, axis), or "
        "tensor.full_tensor()."
    )


def _replicated_spec(info: Any, meta: TensorMeta | None) -> DTensorSpec | None:
    if meta is None:  # an output that is no tensor
        return None
    mesh = info.compute_mesh
    return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)


def promoted_spec(_operator: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> DTensorSpec:
    """A plain tensor counts as replicated. torch's own warns of those of shape (1,)."""
    meta = TensorMeta(shape=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype)
    return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)


def _is_split(value: Any) -> bool:
    return isinstance(value, DTensorSpec) and not value.is_replicated()
