"""Which operators of DTensor can be trusted under which placements, and what is done if not.

Known for torch 2.13, found by the matrix of `keras.ops`. An operator that is not trusted is run on
whole operands; what it writes in place is cut into parts again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils import _pytree as pytree

from shardcore.adapters import torch_compat

aten = torch.ops.aten


def is_split(tensor: Any) -> bool:
    """Whether `tensor` is split or pending."""
    return isinstance(tensor, DTensor) and not all(
        isinstance(placement, Replicate) for placement in tensor.placements
    )


def any_split(args: tuple[Any, ...]) -> bool:
    """Whether an operand is split or pending."""
    return any(is_split(leaf) for leaf in pytree.tree_leaves(args))


# Operators whose result DTensor gets wrong, drops or gets right on some ranks only, with the
# operands for which it does.
DISTRUSTED: dict[Any, Callable[[tuple[Any, ...]], bool]] = {
    operator: any_split
    for operator in (
        aten.convolution.default,
        aten.convolution_backward.default,
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
        aten.index_put.default,
        aten.index_put_.default,
        aten.scatter_.src,
        aten.scatter_.value,
        aten.scatter_add.default,
        aten.scatter_add_.default,
        aten.scatter_reduce.two,
        aten.scatter_reduce_.two,
        aten.masked_scatter_.default,
    )
}


def has_mask(args: tuple[Any, ...]) -> bool:
    """Whether one indexes by a mask: the shape of the result hangs on its values."""
    kinds = (torch.bool, torch.uint8)
    return any(
        isinstance(leaf, torch.Tensor) and leaf.dtype in kinds
        for leaf in pytree.tree_leaves(args[0][1])
    )


# Operators whose result has a shape that hangs on values: DTensor has no rule for them.
DATA_DEPENDENT = (
    aten.bincount.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
)
DISTRUSTED.update(dict.fromkeys(DATA_DEPENDENT, lambda args: True))
DISTRUSTED[aten.index.Tensor] = has_mask


def run_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator on whole operands, on each rank; results are replicated.

    An operand that it writes into keeps its placements, and gets its part of what was written.
    """
    mesh = _mesh(args, kwargs)
    with torch.no_grad():
        plain_args, plain_kwargs = pytree.tree_map_only(DTensor, whole, (args, kwargs))
        result = operator(*plain_args, **plain_kwargs)
        if torch_compat.writes_first(operator):
            if isinstance(args[0], DTensor):
                store(args[0], plain_args[0])
            return args[0]
        return pytree.tree_map_only(torch.Tensor, lambda tensor: replicated(tensor, mesh), result)


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
    mesh = tensor.device_mesh
    splits = [Replicate() if p.is_partial() else p for p in tensor.placements]
    part = replicated(value, mesh).redistribute(mesh, splits).to_local()
    first = all(
        mesh.get_local_rank(axis) == 0
        for axis, placement in enumerate(tensor.placements)
        if placement.is_partial("sum")
    )
    # Of a pending sum, the first rank holds all.
    tensor.to_local().copy_(part if first else torch.zeros_like(part))


def write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that writes into its first operand, as on one device."""
    target = args[0]
    if not isinstance(target, DTensor):
        return run_whole(operator, args, kwargs)
    if _is_broken_view(target):
        return _write_through(operator, args, kwargs)
    if not any_split(args):
        return torch_compat.as_torch_does(operator, args, kwargs)
    if operator in DISTRUSTED:
        return run_whole(operator, args, kwargs)
    before = target.placements
    try:
        result = torch_compat.as_torch_does(operator, args, kwargs)
    except RuntimeError:  # "would change placements", before anything is written
        return run_whole(operator, args, kwargs)
    assert target.placements == before, f"{operator} changed {before} to {target.placements}"
    return result


def _is_broken_view(tensor: DTensor) -> bool:
    """Whether `tensor` is a view for autograd but was copied to be made, as a slice of a split dim."""
    if not tensor._is_view() or not isinstance(tensor._base, DTensor):
        return False
    return _memory(tensor) != _memory(tensor._base)


def _memory(tensor: DTensor) -> int:
    return torch_compat.local_tensor(tensor).untyped_storage().data_ptr()


def _write_through(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write into a view that does not share the memory of its base: both get the values."""
    target: Any = args[0]
    with torch.no_grad():
        rest, named = pytree.tree_map_only(DTensor, whole, (args[1:], kwargs))
        base = whole(target._base)
        view = torch_compat.same_view(target, base)
        operator(view, *rest, **named)
        store(target._base, base)
        store(target, view)
    return target


def _guard(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if DISTRUSTED[operator]((args, kwargs)):
        return run_whole(operator, args, kwargs)
    return torch_compat.as_torch_does(operator, args, kwargs)


def _mesh(*args: Any) -> DeviceMesh:
    leaves = pytree.tree_leaves(args)
    return next(leaf.device_mesh for leaf in leaves if isinstance(leaf, DTensor))


HANDLERS: dict[Any, torch_compat.Handler] = {
    **dict.fromkeys(DISTRUSTED, _guard),
    **dict.fromkeys(torch_compat.writing_operators(), write),
}
