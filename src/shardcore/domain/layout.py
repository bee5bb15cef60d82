"""How a tensor lies on a mesh: the axes that split each dim, and the part each rank holds.

A dim split by several axes is split by the first one (the major), and each chunk again by the
next. Every split is `torch.chunk`'s: chunks of the size rounded up, the later ones smaller or
empty.
"""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import attrs

from shardcore.domain.errors import LayoutError
from shardcore.domain.mesh import Mesh
from shardcore.domain.placements import (
    Partial,
    Placement,
    ReduceOp,
    Replicate,
    Shard,
    check_reduce_op,
)

DimSpec: TypeAlias = str | tuple[str, ...] | None
ShardOrder: TypeAlias = tuple[tuple[int, tuple[str, ...]], ...]
PartialAxes: TypeAlias = tuple[tuple[str, ReduceOp], ...]


def _dim_spec(entry: object) -> DimSpec:
    axes = tuple(entry) if isinstance(entry, list | tuple) else (entry,)
    if axes in ((), (None,)):
        return None
    for axis in axes:
        if not isinstance(axis, str):
            raise LayoutError(
                f"A spec entry is None, an axis name or a tuple of axis names, got {entry!r}."
            )
    return axes[0] if len(axes) == 1 else axes


def _spec(value: Iterable[object]) -> tuple[DimSpec, ...]:
    if not isinstance(value, list | tuple):
        raise LayoutError(f"A spec is a tuple with one entry per tensor dim, got {value!r}.")
    return tuple(_dim_spec(entry) for entry in value)


def _partial(value: Mapping[str, ReduceOp] | PartialAxes) -> PartialAxes:
    return tuple(sorted(value.items() if isinstance(value, Mapping) else value))


def _axes(entry: DimSpec) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry


def _chunk(start: int, size: int, parts: int, position: int) -> tuple[int, int]:
    """The start and size of chunk `position` when `size` elements from `start` are chunked."""
    full = -(-size // parts)
    before = min(position * full, size)
    return start + before, min(full, size - before)


@attrs.frozen
class Layout:
    """A mesh and, per tensor dim, the axes that split it.

    Args:
        mesh: The mesh that the axes belong to.
        spec: Per tensor dim None, an axis name, or a tuple of axis names, the major first.
        partial: Axes along which the values still have to be reduced, with the reduction.

    Raises:
        LayoutError: If an axis is unknown or used twice, an entry is not a name, a reduction
            is unknown, or two reductions do not commute (only "sum" and "avg" do).

    Example:
        >>> mesh = Mesh((2, 2), ("data", "model"))
        >>> layout = Layout(mesh, (None, ("model", "data")))
        >>> [str(placement) for placement in layout.placements]
        ['S(1)', 'S(1)']
        >>> layout.shard_order
        ((1, ('model', 'data')),)
        >>> layout.local_shape((3, 7), rank=3), layout.global_offset((3, 7), rank=3)
        ((3, 1), (0, 6))
    """

    mesh: Mesh
    spec: tuple[DimSpec, ...] = attrs.field(converter=_spec)
    partial: PartialAxes = attrs.field(default=(), converter=_partial)

    def __attrs_post_init__(self) -> None:
        used: set[str] = set()
        for axis in (*self._split_axes, *(axis for axis, _ in self.partial)):
            if axis not in self.mesh.axis_names:
                raise LayoutError(
                    f"Layout {self} names axis {axis!r}, but the axes of its mesh are "
                    f"{self.mesh.axis_names}."
                )
            if axis in used:
                raise LayoutError(f"Layout {self} uses axis {axis!r} twice: use each axis once.")
            used.add(axis)
        ops = {op for _, op in self.partial}
        for op in ops:
            check_reduce_op(op)
        if len(ops) > 1 and ops != {"sum", "avg"}:
            raise LayoutError(
                f"Layout {self} mixes reductions whose order would matter: reduce one first."
            )

    @classmethod
    def replicated(cls, mesh: Mesh, ndim: int) -> "Layout":
        """The layout that every rank holds whole, of a tensor with `ndim` dims."""
        return cls(mesh, (None,) * ndim)

    @classmethod
    def from_placements(
        cls,
        mesh: Mesh,
        placements: Iterable[Placement],
        ndim: int,
        shard_order: ShardOrder = (),
    ) -> "Layout":
        """The layout with one placement per mesh axis: the inverse of `placements`.

        Args:
            mesh: The mesh that the placements belong to.
            placements: One per mesh axis; negative dims count from the end.
            ndim: The number of tensor dims.
            shard_order: For dims split by several axes, those axes, the major first. A dim that
                is not in it is split in the order of the mesh axes, which is DTensor's default.

        Raises:
            LayoutError: If a dim is out of range, the number of placements is not the number of
                axes, or `shard_order` names other axes than those that split the dim.

        Example:
            >>> mesh = Mesh((2, 2), ("data", "model"))
            >>> str(Layout.from_placements(mesh, [Partial(), Shard(-1)], ndim=2))
            "(None, 'model') with sum over 'data'"
        """
        placements = tuple(placements)
        if len(placements) != mesh.ndim:
            raise LayoutError(
                f"Mesh {mesh} takes {mesh.ndim} placements, one per axis, got {len(placements)}."
            )
        split: list[tuple[str, ...]] = [()] * ndim
        partial: dict[str, ReduceOp] = {}
        for axis, placement in zip(mesh.axis_names, placements, strict=True):
            if isinstance(placement, Shard):
                dim = _normal_dim(placement.dim, ndim, axis)
                split[dim] = (*split[dim], axis)
            elif isinstance(placement, Partial):
                partial[axis] = placement.op
        for dim, axes in shard_order:
            if not 0 <= dim < ndim or sorted(axes) != sorted(split[dim]):
                have = split[dim] if 0 <= dim < ndim else "no axes"
                raise LayoutError(
                    f"shard_order splits dim {dim} by {axes}, the placements split it by {have}."
                )
            split[dim] = tuple(axes)
        return cls(mesh, tuple(split), partial)

    @property
    def ndim(self) -> int:
        """The number of tensor dims."""
        return len(self.spec)

    @property
    def _split_axes(self) -> tuple[str, ...]:
        return tuple(axis for entry in self.spec for axis in _axes(entry))

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return not self._split_axes and not self.partial

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """The axes that split tensor dim `dim`, the major first."""
        return _axes(self.spec[dim])

    def placement(self, axis: str) -> Placement:
        """What `axis` does to the tensor.

        Raises:
            MeshError: If the mesh has no such axis.
        """
        self.mesh.axis_index(axis)
        for dim, entry in enumerate(self.spec):
            if axis in _axes(entry):
                return Shard(dim)
        ops = dict(self.partial)
        return Partial(ops[axis]) if axis in ops else Replicate()

    @property
    def placements(self) -> tuple[Placement, ...]:
        """What each mesh axis does to the tensor, in the order of the axes.

        They do not tell the order of the axes that split one dim: see `shard_order`.
        """
        return tuple(self.placement(axis) for axis in self.mesh.axis_names)

    @property
    def shard_order(self) -> ShardOrder:
        """The dims split in another order than that of the mesh axes, with their axes."""
        split = ((dim, self.dim_axes(dim)) for dim in range(self.ndim))
        order = self.mesh.axis_index
        return tuple((dim, axes) for dim, axes in split if axes != tuple(sorted(axes, key=order)))

    def without(self, *axes: str) -> "Layout":
        """This layout with `axes` splitting no dim.

        The compute layout is the storage layout without the batch axis.

        Raises:
            MeshError: If the mesh has no such axis.

        Example:
            >>> mesh = Mesh((2, 2), ("data", "model"))
            >>> str(Layout(mesh, (("data", "model"), None)).without("data"))
            "('model', None)"
        """
        for axis in axes:
            self.mesh.axis_index(axis)
        spec = tuple(tuple(a for a in _axes(entry) if a not in axes) for entry in self.spec)
        return Layout(self.mesh, spec, self.partial)

    def local_shape(self, shape: Iterable[int], rank: int) -> tuple[int, ...]:
        """The shape of what `rank` holds of a tensor of global shape `shape`.

        Raises:
            LayoutError: If `shape` has another number of dims than the spec.
            MeshError: If the mesh has no such rank.
        """
        return tuple(size for _, size in self._block(shape, rank))

    def global_offset(self, shape: Iterable[int], rank: int) -> tuple[int, ...]:
        """Where what `rank` holds begins in the global tensor.

        In a dim where the rank holds nothing this is the end of the dim, as in torch.

        Raises:
            LayoutError: If `shape` has another number of dims than the spec.
            MeshError: If the mesh has no such rank.
        """
        return tuple(start for start, _ in self._block(shape, rank))

    def slices(self, shape: Iterable[int], rank: int) -> tuple[slice, ...]:
        """The part of the global tensor that `rank` holds, as an index.

        Raises:
            LayoutError: If `shape` has another number of dims than the spec.
            MeshError: If the mesh has no such rank.
        """
        return tuple(slice(start, start + size) for start, size in self._block(shape, rank))

    def _block(self, shape: Iterable[int], rank: int) -> tuple[tuple[int, int], ...]:
        """Per dim the start and the size of what `rank` holds."""
        sizes = tuple(shape)
        if len(sizes) != self.ndim:
            raise LayoutError(
                f"Layout {self} is of a tensor with {self.ndim} dims, got shape {sizes}."
            )
        at = dict(zip(self.mesh.axis_names, self.mesh.coordinate(rank), strict=True))
        block = []
        for size, entry in zip(sizes, self.spec, strict=True):
            part = (0, size)
            for axis in _axes(entry):
                part = _chunk(*part, self.mesh.axis_size(axis), at[axis])
            block.append(part if part[1] else (size, 0))
        return tuple(block)

    def __str__(self) -> str:
        pending = ", ".join(f"{op} over {axis!r}" for axis, op in self.partial)
        return f"{self.spec} with {pending}" if pending else str(self.spec)


def _normal_dim(dim: int, ndim: int, axis: str) -> int:
    if not -ndim <= dim < ndim:
        raise LayoutError(f"Axis {axis!r} shards dim {dim}, but the tensor has {ndim} dims.")
    return dim % ndim
