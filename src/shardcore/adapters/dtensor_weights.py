"""What a variable keeps split along an axis that splits an activation is gathered to be used.

DTensor 2.13 takes what is cheaper at that operator, and moves the activation where the batch is
small, or is left with a split that the next operators pay for. Here the weight is moved, for one
operator, and what comes of the activation stays as it lies.
"""

import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from shardcore.adapters import torch_compat
from shardcore.adapters.dtensor_gathered import GATHERED
from shardcore.adapters.dtensor_trust import is_split
from shardcore.adapters.torch_compat import dtensor as dtensor_compat
from shardcore.ports.whereabouts import current_layer

aten = torch.ops.aten

# By the places of the factors among the operands: the dim that is summed.
SUMMED: dict[Any, dict[int, int]] = {
    aten.mm.default: {0: 1, 1: 0},
    aten.addmm.default: {1: 1, 2: 0},
    aten.bmm.default: {0: 2, 1: 1},
    aten.baddbmm.default: {1: 2, 2: 1},
    aten.convolution.default: {0: 1, 1: 1},
    aten.convolution_backward.default: {0: 1, 1: 1, 2: 0},
    aten.embedding.default: {0: 0, 1: -1},
}
# Those whose first dim is one and the same in the factors and the result.
_IN_BATCHES = (aten.bmm.default, aten.baddbmm.default)
# The memory of what variables keep.
_KEPT: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()


def keep(tensor: DTensor) -> DTensor:
    """`tensor`, which a variable is going to keep. Its views are known by its memory."""
    if is_split(tensor):
        _KEPT.add(_memory(tensor))
    return tensor


def _is_kept(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and _memory(tensor) in _KEPT


def _memory(tensor: DTensor) -> torch.UntypedStorage:
    return dtensor_compat.local_tensor(tensor).untyped_storage()


def _use(
    run: torch_compat.Handler, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """An operator with its weights whole along the axes that split an activation beside them."""
    summed = SUMMED[operator]
    weights = [place for place in summed if place < len(args) and _is_kept(args[place])]
    if not weights or len(weights) == len(summed):
        return run(operator, args, kwargs)
    activations = {place: dim for place, dim in summed.items() if place not in weights}
    used = list(args)
    for place in weights:
        axes = set(_axes(operator, args[place], [(args[at], d) for at, d in activations.items()]))
        if axes:
            used[place] = GATHERED.along(args[place], axes)
    return run(operator, tuple(used), kwargs)


def _axes(operator: Any, weight: DTensor, activations: list[tuple[Any, int]]) -> Iterator[int]:
    """The mesh axes that split `weight`, and what is not summed of an activation."""
    for axis, (size, placement) in enumerate(
        zip(weight.device_mesh.shape, weight.placements, strict=True)
    ):
        if size == 1 or isinstance(placement, Replicate):
            continue
        own = getattr(placement, "dim", None)
        for activation, summed in activations:
            dim = _split_dim(activation, axis)
            together = operator in _IN_BATCHES and dim == own == 0
            if dim is not None and dim != summed and not together:
                yield axis


def _split_dim(tensor: Any, axis: int) -> int | None:
    """The dim of `tensor` that `axis` splits."""
    if not isinstance(tensor, DTensor):
        return None
    dim: int | None = getattr(tensor.placements[axis], "dim", None)
    return dim


def _scale(
    run: torch_compat.Handler, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`mul`: what is scaled by a weight lies as before. An optimizer takes a weight as it lies."""
    if not _is_computing() or not any(map(_is_kept, args)):
        return run(operator, args, kwargs)
    if all(_is_kept(each) or not isinstance(each, DTensor) for each in args):
        return keep(run(operator, args, kwargs))
    beside = [each for each in args if isinstance(each, DTensor) and not _is_kept(each)]
    used = [_whole_beside(each, beside[0]) if _is_kept(each) else each for each in args]
    return run(operator, tuple(used), kwargs)


def _whole_beside(weight: DTensor, tensor: DTensor) -> DTensor:
    """`weight`, whole along the axes by which `tensor` is not split in the same dim.

    What is larger, and whole, is cut for nothing: there the result is split as the weight is.
    """
    if not tensor.ndim:
        return weight
    axes = {
        axis
        for axis, placement in enumerate(weight.placements)
        if (own := getattr(placement, "dim", None)) is not None
        and (its := _split_dim(tensor, axis)) != own - weight.ndim + tensor.ndim
        and (its is not None or weight.numel() == tensor.numel())
    }
    return GATHERED.along(weight, axes) if axes else weight


def _is_computing() -> bool:
    """Whether a model computes, forward or backward; else an optimizer does."""
    return bool(current_layer()) or torch.is_grad_enabled() or torch_compat.backward_pass() >= 0


def _copy(
    run: torch_compat.Handler, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`_to_copy`, `clone`: a weight in another dtype is a weight, and gathered in that dtype."""
    found = run(operator, args, kwargs)
    return keep(found) if _is_kept(args[0]) and isinstance(found, DTensor) else found


def handlers(others: Mapping[Any, torch_compat.Handler]) -> dict[Any, torch_compat.Handler]:
    """What is done before the handlers in `others`, or what torch does."""
    before = {
        **dict.fromkeys(SUMMED, _use),
        aten.mul.Tensor: _scale,
        aten.clone.default: _copy,
        torch_compat.TO_COPY: _copy,
    }
    return {
        operator: partial(handler, others.get(operator, dtensor_compat.as_torch_does))
        for operator, handler in before.items()
    }
