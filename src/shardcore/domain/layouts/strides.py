"""The order of a tensor's dims in memory, and the strides that follow from it."""

from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]
# The dims of a tensor, outermost in memory first.
Order: TypeAlias = tuple[int, ...]


def contiguous_strides(shape: Shape) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor.

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
    """Returns the strides of a tensor without gaps whose dims are in memory in `order`.

    Example:
        >>> strides_in((0, 2, 1), (2, 3, 4))
        (12, 1, 3)
    """
    in_memory = contiguous_strides(tuple(shape[dim] for dim in order))
    by_dim = dict(zip(order, in_memory, strict=True))
    return tuple(by_dim[dim] for dim in range(len(shape)))


def memory_order(strides: tuple[int, ...]) -> Order:
    """Returns the order in memory of the dims of a tensor with these strides.

    Example:
        >>> memory_order((12, 1, 3))
        (0, 2, 1)
    """
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))


def inverse(order: Order) -> Order:
    """Returns the order that undoes `order`.

    Example:
        >>> inverse((2, 0, 1))
        (1, 2, 0)
    """
    return tuple(sorted(range(len(order)), key=order.__getitem__))
