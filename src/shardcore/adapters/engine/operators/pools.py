"""Pools of images: a plane may be sharded between windows that do not overlap."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shardcore.adapters import torch_private
from shardcore.adapters.engine.plan import run_rule
from shardcore.adapters.engine.task import (
    Handler,
    Operand,
    Parts,
    Planner,
    Task,
    by_operator,
    dims_of_plane,
    order_of,
)
from shardcore.adapters.torch_private import Args, Operator
from shardcore.domain.engine.rules import layers


def _average(operator: Operator, *args: Any) -> Task:
    """Plans `avg_pool2d(image, window, ...)`, and its gradient, whose first operand is pooled."""
    *gradient, image = (arg for arg in args if isinstance(arg, Operand))
    numbers = args[len(gradient) + 1 :]
    windows = _windows(operator, image, *numbers[:3])
    return _sharded(operator, args, windows, pooled=(0,) if gradient else ())


def _largest(operator: Operator, *args: Any) -> Task | Handler:
    """Plans `max_pool2d_with_indices(image, window, stride, padding, dilation, ...)`.

    The gradient operator takes the gradient of the result first, then the image, and the indices
    last.
    """
    is_gradient = isinstance(args[1], Operand)
    image, *numbers = args[is_gradient:]
    windows = _windows(operator, image, *numbers[:4])
    if any(_shards_plane(arg, windows) for arg in args if isinstance(arg, Operand)):
        return _largest_backward_of_sharded if is_gradient else _largest_of_sharded
    pooled = (0, 2) if is_gradient else ()
    return _sharded(operator, args, (None,) * len(windows), pooled)


def _windows(
    operator: Operator, image: Operand | torch.Tensor, *how: Any
) -> tuple[int | None, ...]:
    return layers.windows(tuple(image.shape[image.ndim - dims_of_plane(operator) :]), *how)


def _shards_plane(tensor: Operand, windows: Sequence[int | None]) -> bool:
    """Finds a sharded dim among those that consist of windows."""
    first = tensor.ndim - len(windows)
    return any(
        window is not None and tensor.is_sharded(first + dim) for dim, window in enumerate(windows)
    )


def _sharded(
    operator: Operator, args: Args, windows: tuple[int | None, ...], pooled: Sequence[int]
) -> Task:
    operands = [arg for arg in args if isinstance(arg, Operand)]
    results = torch_private.number_of_results(operator)
    kinds = tuple(position in pooled for position in range(len(operands)))
    rule = layers.pool(operands[0].ndim, windows, kinds, results)
    return Task(rule, operands, orders=[order_of(operands[0])] * results)


def _largest_of_sharded(operator: Operator, image: torch.Tensor, *numbers: Any) -> Any:
    """Converts indices in each rank's part of the plane to indices in the full plane."""
    windows = _windows(operator, image, *numbers[:4])
    sizes = tuple(image.shape[-len(windows) :])

    def compute(parts: Parts) -> Sequence[torch.Tensor]:
        part, *own = parts
        maxima, indices = operator(part, *numbers)
        numbered = [of_dim.__getitem__ for of_dim in own]
        return maxima, _renumbered(indices, part.shape[-len(sizes) :], sizes, numbered)

    rule = layers.pool(image.ndim, windows, (False,), results=2, numbered=True)
    return tuple(run_rule(operator, rule, (image, *_numbers(image, sizes)), compute))


def _largest_backward_of_sharded(
    operator: Operator, gradient: torch.Tensor, image: torch.Tensor, *args: Any
) -> Any:
    """Converts indices in the full plane to indices in each rank's part."""
    *numbers, indices = args
    windows = _windows(operator, image, *numbers[:4])
    sizes = tuple(image.shape[-len(windows) :])

    def compute(parts: Parts) -> Sequence[torch.Tensor]:
        grad, part, maxima, *own = parts
        numbered = [partial(torch.searchsorted, of_dim) for of_dim in own]
        local = _renumbered(maxima, sizes, part.shape[-len(sizes) :], numbered)
        return (operator(grad, part, *numbers, local),)

    rule = layers.pool(image.ndim, windows, (True, False, True), numbered=True)
    operands = (gradient, image, indices, *_numbers(image, sizes))
    return run_rule(operator, rule, operands, compute)[0]


def _numbers(image: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Numbers the elements of each dim of a plane, sharded as the dim."""
    return [torch.arange(size, device=image.device) for size in sizes]


def _renumbered(
    indices: torch.Tensor,
    sizes: Sequence[int],
    others: Sequence[int],
    numbered: Sequence[Callable[[torch.Tensor], torch.Tensor]],
) -> torch.Tensor:
    """Converts row-major indices into planes of `sizes` to indices into planes of `others`.

    For each dim, `numbered` has the indices of its elements there.
    """
    renumbered, step = torch.zeros_like(indices), 1
    dims = zip(reversed(sizes), reversed(others), reversed(numbered), strict=True)
    for size, other, number in dims:
        renumbered = renumbered + number(indices % size) * step
        indices, step = indices // size, step * other
    return renumbered


PLANNERS: dict[Any, Planner] = by_operator(
    {
        "avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward": _average,
        "max_pool2d_with_indices max_pool2d_with_indices_backward "
        "max_pool3d_with_indices max_pool3d_with_indices_backward": _largest,
    }
)
