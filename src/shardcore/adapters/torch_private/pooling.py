"""Max pooling that Inductor vectorizes."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Decompositions = Mapping[Any, Callable[..., Any]]


def decompose_by_tiles(otherwise: Decompositions) -> Decompositions:
    """Returns decompositions for images with innermost channels that are pooled by tiles.

    Inductor (torch 2.13) adds the gradient of max pooling by index, element by element: on a CPU
    half of the step of a small CNN. For tiles, which neither overlap nor are padded, pooling and
    its gradient are comparisons of full tensors.

    Args:
        otherwise: The decompositions of Inductor, for other images. Without one for pooling or
            its gradient, as in torch 2.11, there are none by tiles.
    """
    if not {_POOL, _BACKWARD} <= otherwise.keys():
        return {}
    pool, backward = otherwise[_POOL], otherwise[_BACKWARD]

    def pool_by_tiles(image: torch.Tensor, *how: Any, **named: Any) -> Any:
        tile = _tile(image, *how, **named)
        return pool(image, *how, **named) if tile is None else _pool(image, tile)

    def gradient(of_result: torch.Tensor, image: torch.Tensor, *rest: Any) -> Any:
        *how, indices = rest  # the index of each maximum is recomputed
        tile = _tile(image, *how)
        if tile is None:
            return backward(of_result, image, *how, indices)
        return _gradient(of_result, image, tile)

    return {_POOL: pool_by_tiles, _BACKWARD: gradient}


_POOL = torch.ops.aten.max_pool2d_with_indices.default
_BACKWARD = torch.ops.aten.max_pool2d_with_indices_backward.default

# Each element of a tile is a separate operand in the generated code.
_LARGEST = 16


def _pool(image: torch.Tensor, tile: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the maximum of each tile, and its index in the image.

    Shapes: (batch, channels, height, width) to (batch, channels, rows, columns), twice.
    """
    largest, index = _largest(image, tile)
    rows, columns = (torch.arange(size, device=image.device) for size in largest.shape[2:])
    row = rows[:, None] * tile[0] + index // tile[1]
    column = columns * tile[1] + index % tile[1]
    return largest, row * image.shape[3] + column


def _gradient(gradient: torch.Tensor, image: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Returns the gradient of `image`: at each maximum the gradient of its tile, else zero."""
    _, index = _largest(image, tile)
    number = torch.arange(tile[0] * tile[1], dtype=index.dtype, device=index.device)
    is_largest = _spread(index) == number.view(tile[0], 1, tile[1])
    tiles = torch.where(is_largest, _spread(gradient), 0.0)
    full = tiles.flatten(4, 5).flatten(2, 3)
    left = [0, image.shape[3] - full.shape[3], 0, image.shape[2] - full.shape[2]]
    return torch.nn.functional.pad(full, left)


def _tile(
    image: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[int, int] | None:
    """Returns height and width of the tiles; None if there are none, or other code is as fast.

    The operands have the names and defaults of torch.
    """
    tile = (kernel_size[0], kernel_size[-1])
    is_tiled = not stride or (stride[0], stride[-1]) == tile
    is_plain = not any(padding) and set(dilation) == {1} and not ceil_mode
    lies_last = image.dim() == 4 and image.shape[1] > 1 and image.stride(1) == 1
    return tile if is_tiled and is_plain and lies_last and tile[0] * tile[1] <= _LARGEST else None


def _largest(image: torch.Tensor, tile: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the maximum of each tile, and its index there: the first of equals, the last nan."""
    height, width = tile
    rows, columns = image.shape[2] // height * height, image.shape[3] // width * width
    parts = [
        image[:, :, row:rows:height, column:columns:width]
        for row in range(height)
        for column in range(width)
    ]
    none = torch.zeros_like(parts[0], dtype=torch.int32)
    return functools.reduce(_maximum_with_index, enumerate(parts[1:], 1), (parts[0], none))


def _maximum_with_index(
    best: tuple[torch.Tensor, torch.Tensor], numbered: tuple[int, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    (largest, index), (number, part) = best, numbered
    is_larger = (part > largest) | (part != part)  # as `isnan`, which is not vectorized
    return torch.where(is_larger, part, largest), torch.where(is_larger, number, index)


def _spread(tiled: torch.Tensor) -> torch.Tensor:
    """Returns `tiled` with shape (batch, channels, rows, 1, columns, 1)."""
    return tiled[:, :, :, None, :, None]
