"""Which operators of DTensor can be trusted under which placements, and what is done if not.

Known for torch 2.13, found by the matrix of `keras.ops`. An operator that is not trusted is run on
whole operands; what it writes in place is cut into parts again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from shardcore.adapters import fallback, torch_compat
from shardcore.adapters.dtensor_placements import is_pending, is_strided, settled_placements, splits
from shardcore.adapters.torch_compat import dtensor as dtensor_compat

aten = torch.ops.aten


def is_split(tensor: Any) -> bool:
    """Whether `tensor` is split or pending, over more than one rank."""
    return isinstance(tensor, DTensor) and any(
        size > 1 and not isinstance(placement, Replicate)
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    )


def any_split(args: tuple[Any, ...]) -> bool:
    """Whether an operand is split or pending."""
    return any(is_split(leaf) for leaf in torch_compat.tree_leaves(args))


def any_pending(args: tuple[Any, ...]) -> bool:
    """Whether an operand is a pending reduction."""
    return any(is_pending(leaf) for leaf in torch_compat.tree_leaves(args))


def reduces_a_split_dim(args: tuple[Any, ...]) -> bool:
    """Whether `argmax(x, dim)` and its kind look along a dim that is split, or along all.

    Where any dim is split in strides, torch 2.13 refuses.
    """
    (tensor, *rest), kwargs = args
    dim = rest[0] if rest else kwargs.get("dim")
    if not is_split(tensor) or dim is None:
        return is_split(tensor)
    return any(
        p.is_partial() or is_strided(p) or splits(p, dim % tensor.ndim) for p in tensor.placements
    )


def no_dims(args: tuple[Any, ...]) -> bool:
    """Whether a reduction names no dims, which means all of them: DTensor takes it as none."""
    return any_split(args) and len(args[0]) > 1 and args[0][1] in ([], ())


def counts_frequencies(args: tuple[Any, ...]) -> bool:
    """Whether the gradient of an embedding is divided by how often a row is read, on all ranks."""
    operands, kwargs = args
    by_frequency = operands[4] if len(operands) > 4 else kwargs.get("scale_grad_by_freq")
    return bool(by_frequency) and any_split(args)


def has_mask(args: tuple[Any, ...]) -> bool:
    """Whether one indexes by a mask: the shape of the result hangs on its values."""
    kinds = (torch.bool, torch.uint8)
    return any(
        isinstance(leaf, torch.Tensor) and leaf.dtype in kinds
        for leaf in torch_compat.tree_leaves(args[0][1])
    )


def looks_along_one_axis_of_several(args: tuple[Any, ...]) -> bool:
    """Whether `gather(x, dim, index)` looks along a split dim, and other axes split `x` too.

    What each rank finds is pending, of a kind that torch 2.13 keeps for one axis only.
    """
    (tensor, dim, *_), _ = args
    if not isinstance(tensor, DTensor):
        return False
    busy, along = _busy(tensor), dim % max(tensor.ndim, 1)
    return len(busy) > 1 and any(p.is_partial() or splits(p, along) for p in busy)


def _busy(tensor: DTensor) -> list[Placement]:
    """What the axes of several ranks do to `tensor`, but for those that replicate it."""
    pairs = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return [p for size, p in pairs if size > 1 and not isinstance(p, Replicate)]


def always(_args: tuple[Any, ...]) -> bool:
    """Whatever the operands."""
    return True


WRONG_WHEN_SPLIT = (
    # No conversion from replicated to a pending product.
    aten.prod.default,
    aten.prod.dim_int,
    # A mean over split operands is divided by the size of a part.
    aten.mse_loss.default,
    aten.mse_loss_backward.default,
    aten.huber_loss.default,
    aten.huber_loss_backward.default,
    aten.smooth_l1_loss.default,
    aten.smooth_l1_loss_backward.default,
    aten.soft_margin_loss.default,
    aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_backward.default,
    # Rows are written where no rank, or each rank, finds them.
    aten.index_add.default,
    aten.index_add_.default,
    aten.index_copy.default,
    aten.index_copy_.default,
    aten.index_fill_.int_Scalar,
    aten.index_put_.default,
    aten.scatter_.src,
    aten.scatter_.value,
    aten.scatter_add.default,
    aten.scatter_add_.default,
    aten.scatter_reduce.two,
    aten.scatter_reduce_.two,
    aten.masked_scatter_.default,
)
# Reductions that take no dims for all of them.
REDUCTIONS = (
    aten.all.dims,
    aten.amax.default,
    aten.amin.default,
    aten.logsumexp.default,
    aten.mean.dim,
    aten.nansum.default,
    aten.sum.dim_IntList,
)
# Operators whose result has a shape that hangs on values: DTensor has no rule for them.
DATA_DEPENDENT = (
    aten.bincount.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    torch_compat.UNIQUE,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
)
# Operators without a rule, of which no fake run tells the shape of the result either.
WITHOUT_RULE = (
    aten.as_strided.default,
    aten.linalg_lstsq.default,
    *torch_compat.CTC_LOSS,
)

# Operators whose result DTensor gets wrong, drops or gets right on some ranks only, with the
# operands for which it does.
DISTRUSTED: dict[Any, Callable[[tuple[Any, ...]], bool]] = {
    **dict.fromkeys(WRONG_WHEN_SPLIT, any_split),
    **dict.fromkeys(REDUCTIONS, no_dims),
    **dict.fromkeys((*DATA_DEPENDENT, *WITHOUT_RULE), always),
    aten.argmax.default: reduces_a_split_dim,
    aten.argmin.default: reduces_a_split_dim,
    aten.embedding_dense_backward.default: counts_frequencies,
    aten.gather.default: looks_along_one_axis_of_several,
    aten.index.Tensor: has_mask,
    aten.view.dtype: any_pending,
}


def run_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator on whole operands, on each rank; results are replicated.

    An operand that it writes into keeps its placements, and gets its part of what was written.
    """
    mesh = _mesh(args, kwargs)
    fallback.tell(operator, (args, kwargs))
    with torch.no_grad():
        plain_args, plain_kwargs = torch_compat.tree_map_only(DTensor, whole, (args, kwargs))
        result = operator(*plain_args, **plain_kwargs)
        if torch_compat.writes_first(operator):
            if isinstance(args[0], DTensor):
                store(args[0], plain_args[0])
            return args[0]
        return torch_compat.tree_map_only(
            torch.Tensor, lambda tensor: replicated(tensor, mesh), result
        )


def whole(tensor: DTensor) -> torch.Tensor:
    """The whole value, which the caller may overwrite."""
    full = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    local: torch.Tensor = full.to_local()
    return local if is_split(tensor) else local.clone()


def replicated(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """`value`, which all ranks have, as a DTensor."""
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def store(tensor: DTensor, value: torch.Tensor) -> None:
    """Overwrite `tensor` by the whole `value`, in its placements."""
    put_in(tensor, replicated(value, tensor.device_mesh))


def put_in(tensor: DTensor, value: DTensor) -> None:
    """Overwrite `tensor` by `value`, in its placements."""
    mesh = tensor.device_mesh
    part = value.redistribute(mesh, settled_placements(tensor)).to_local()
    first = all(
        mesh.get_local_rank(axis) == 0
        for axis, placement in enumerate(tensor.placements)
        if placement.is_partial("sum")
    )
    # Of a pending sum, the first rank holds all.
    tensor.to_local().copy_(part if first else torch.zeros_like(part))


def _reshape_in_place(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`squeeze_` and its kind, for which DTensor has no rule, by the rule of `squeeze`."""
    changed = torch_compat.out_of_place(operator)(*args, **kwargs)
    return dtensor_compat.become(operator, args, kwargs, changed)


def _from_the_front(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of a slice. DTensor does not take a dim that is counted from the end."""
    gradient, sizes, dim, *rest = args
    args = (gradient, sizes, dim % len(sizes), *rest)
    return dtensor_compat.as_torch_does(operator, args, kwargs)


def _guard(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if DISTRUSTED[operator]((args, kwargs)):
        return run_whole(operator, args, kwargs)
    return dtensor_compat.as_torch_does(operator, args, kwargs)


def _mesh(*args: Any) -> DeviceMesh:
    leaves = torch_compat.tree_leaves(args)
    return next(leaf.device_mesh for leaf in leaves if isinstance(leaf, DTensor))


HANDLERS: dict[Any, torch_compat.Handler] = {
    **dict.fromkeys(DISTRUSTED, _guard),
    **dict.fromkeys(torch_compat.reshaping_operators(), _reshape_in_place),
    aten.select_backward.default: _from_the_front,
    aten.slice_backward.default: _from_the_front,
}
