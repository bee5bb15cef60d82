"""The order of a tensor's elements in memory: its strides, and pieces of consecutive elements."""

import math
from collections.abc import Iterator
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]
# The dims of a tensor, outermost in memory first.
Order: TypeAlias = tuple[int, ...]


def contiguous_strides(shape: Shape) -> tuple[int, ...]:
    """Computes strides in elements; a dim of size 0 counts as one of size 1, as in torch.

    Example:
        >>> contiguous_strides((2, 3, 4)), contiguous_strides((2, 0, 4))
        ((12, 4, 1), (4, 4, 1))
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def strides_in(order: Order, shape: Shape) -> tuple[int, ...]:
    """Computes the strides of a tensor without gaps whose dims are in memory in `order`.

    Example:
        >>> strides_in((0, 2, 1), (2, 3, 4))
        (12, 1, 3)
    """
    in_memory = contiguous_strides(tuple(shape[dim] for dim in order))
    by_dim = dict(zip(order, in_memory, strict=True))
    return tuple(by_dim[dim] for dim in range(len(shape)))


def memory_order(strides: tuple[int, ...]) -> Order:
    """Sorts the dims of a tensor with these strides, the outermost in memory first.

    Example:
        >>> memory_order((12, 1, 3))
        (0, 2, 1)
    """
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))


def inverse(order: Order) -> Order:
    """Inverts a permutation of dims.

    Example:
        >>> inverse((2, 0, 1))
        (1, 2, 0)
    """
    return tuple(sorted(range(len(order)), key=order.__getitem__))


# CPU generators of torch draw normal numbers in blocks of so many (ADR 34).
BLOCK = 16


def pieces(shape: tuple[int, ...], most: int) -> Iterator[tuple[slice, ...]]:
    """Yields the pieces of a tensor of `shape`, in row-major order, each an index of it.

    Every piece but the last has a multiple of 16 elements, so that piece by piece the same numbers
    are drawn as at once. A piece has at most `most` elements where the shape allows it.

    Args:
        shape: The shape of the tensor.
        most: The number of elements of a piece, at least 16.

    Example:
        >>> [rows for rows, _ in pieces((100, 8), most=400)]
        [slice(0, 48, None), slice(48, 100, None)]
        >>> list(pieces((2, 32), most=32))
        [(slice(0, 1, None), slice(0, 32, None)), (slice(1, 2, None), slice(0, 32, None))]
    """
    inner = math.prod(shape[1:])
    if math.prod(shape) <= most:
        yield tuple(slice(0, size) for size in shape)
    elif inner * BLOCK > most and inner % BLOCK == 0:
        for row in range(shape[0]):
            for rest in pieces(shape[1:], most):
                yield (slice(row, row + 1), *rest)
    else:
        rows = max(most // inner // BLOCK, 1) * BLOCK
        starts = range(0, max(shape[0] - BLOCK + 1, 1), rows)
        stops = [*starts[1:], shape[0]]
        for start, stop in zip(starts, stops, strict=True):
            yield (slice(start, stop), *(slice(0, size) for size in shape[1:]))


def overlap(
    piece: tuple[slice, ...], held: tuple[slice, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Intersects two parts of a tensor: the common part as an index of each of the two.

    Example:
        >>> overlap((slice(8, 16),), (slice(12, 20),))
        ((slice(4, 8, None),), (slice(0, 4, None),))
    """
    within_piece, within_held = [], []
    for one, other in zip(piece, held, strict=True):
        start = max(one.start, other.start)
        stop = max(start, min(one.stop, other.stop))
        within_piece.append(slice(start - one.start, stop - one.start))
        within_held.append(slice(start - other.start, stop - other.start))
    return tuple(within_piece), tuple(within_held)
