"""The device mesh as arithmetic: named axes, coordinates of ranks, and groups along an axis."""

import math
from collections.abc import Iterable
from functools import cached_property
from itertools import product
from operator import index

import attrs

from shardcore.domain.errors import MeshError


def _tuple(value: Iterable[object], what: str) -> tuple[object, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise MeshError(f"Mesh {what} must be a sequence, got {value!r}.", got=repr(value))
    return tuple(value)


def _sizes(value: Iterable[int]) -> tuple[int, ...]:
    sizes = _tuple(value, "shape")
    for size in sizes:
        if isinstance(size, bool) or not hasattr(size, "__index__") or index(size) < 1:
            raise MeshError(
                f"Mesh shape {sizes} has size {size!r}: give integers of 1 or more.", got=repr(size)
            )
    return tuple(index(size) for size in sizes)  # type: ignore[arg-type]


def _names(value: Iterable[str]) -> tuple[str, ...]:
    names = _tuple(value, "axis_names")
    for name in names:
        if not isinstance(name, str) or not name:
            raise MeshError(
                f"Mesh axis name {name!r} in {names}: give non-empty strings.", got=repr(name)
            )
        if names.count(name) > 1:
            raise MeshError(
                f"Mesh axis name {name!r} occurs twice in {names}: give each once.", name=name
            )
    return names  # type: ignore[return-value]


@attrs.frozen(cache_hash=True)
class Mesh:
    """A grid of ranks with named axes. It knows no device.

    A rank here is a position in the mesh, from 0 to `size - 1`, in row-major order: the last
    axis varies fastest.

    Args:
        shape: The number of ranks along each axis, each 1 or more.
        axis_names: One name per axis, all different.

    Raises:
        MeshError: If a size is not a positive integer, a name is empty or repeated, or the two
            lengths differ or are zero.

    Example:
        >>> mesh = Mesh((2, 3), ("data", "model"))
        >>> mesh.size, mesh.coordinate(4)
        (6, (1, 1))
        >>> mesh.axis_group("data", 4)
        (1, 4)
    """

    shape: tuple[int, ...] = attrs.field(converter=_sizes)
    axis_names: tuple[str, ...] = attrs.field(converter=_names)

    def __attrs_post_init__(self) -> None:
        if len(self.shape) != len(self.axis_names):
            raise MeshError(
                f"Mesh shape {self.shape} has {len(self.shape)} axes but axis_names "
                f"{self.axis_names} has {len(self.axis_names)}: give one name per axis."
            )
        if not self.shape:
            raise MeshError(
                "A mesh has at least one axis, got none: Mesh((1,), ('data',)) has one."
            )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @cached_property
    def _coordinates(self) -> tuple[tuple[int, ...], ...]:
        return tuple(product(*map(range, self.shape)))

    def axis_index(self, axis: str) -> int:
        """The position of `axis` among the axes.

        Raises:
            MeshError: If the mesh has no such axis.
        """
        if axis not in self.axis_names:
            raise MeshError(
                f"Mesh has no axis {axis!r}: its axes are {self.axis_names}.", name=axis
            )
        return self.axis_names.index(axis)

    def axis_size(self, axis: str) -> int:
        """The number of ranks along `axis`."""
        return self.shape[self.axis_index(axis)]

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The position of `rank` along each axis.

        Raises:
            MeshError: If the mesh has no such rank.
        """
        if isinstance(rank, bool) or not hasattr(rank, "__index__"):
            raise MeshError(f"A rank is an integer, got {rank!r}.", got=repr(rank))
        if not 0 <= rank < self.size:
            raise MeshError(
                f"Mesh {self} has ranks 0 to {self.size - 1}, got {rank}.", got=str(rank)
            )
        return self._coordinates[rank]

    def size_along(self, axes: Iterable[str]) -> int:
        """The number of ranks along `axes` together.

        Example:
            >>> Mesh((2, 3, 4), ("replica", "shard", "model")).size_along(("replica", "shard"))
            6
        """
        return math.prod(map(self.axis_size, axes))

    def position_along(self, axes: Iterable[str], rank: int) -> int:
        """Numbers `rank` among the ranks along `axes`, the first of them the major.

        Example:
            >>> Mesh((2, 3), ("replica", "shard")).position_along(("replica", "shard"), 4)
            4
        """
        position, coordinate = 0, self.coordinate(rank)
        for axis in axes:
            position = position * self.axis_size(axis) + coordinate[self.axis_index(axis)]
        return position

    def axis_group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Lists `rank` and the ranks that differ from it only along `axis`, in order."""
        step = math.prod(self.shape[self.axis_index(axis) + 1 :])
        first = rank - self.coordinate(rank)[self.axis_index(axis)] * step
        return tuple(first + step * position for position in range(self.axis_size(axis)))

    def axis_groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Lists all the groups along `axis`, ordered by their first rank."""
        index = self.axis_index(axis)
        firsts = (rank for rank in range(self.size) if not self.coordinate(rank)[index])
        return tuple(self.axis_group(axis, rank) for rank in firsts)

    def __str__(self) -> str:
        axes = zip(self.axis_names, self.shape, strict=True)
        return "(" + ", ".join(f"{name}={size}" for name, size in axes) + ")"
