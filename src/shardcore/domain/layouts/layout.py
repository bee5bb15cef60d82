"""Layouts: the mesh axes that shard each dim of a tensor, and the part that each rank holds.

If several axes shard a dim, the first one (the major) shards it, and the next one shards each
chunk. Every axis shards as `torch.chunk`: the size is rounded up, so that later chunks are
smaller or empty. A dim in blocks is sharded between blocks only: its chunks are chunks of blocks.
A dim of several segments is sharded within each of them, or between them and then within.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from typing import TypeAlias

import attrs

from shardcore.domain.errors import LayoutError
from shardcore.domain.layouts.chunks import chunk_at, levels, normal_blocks, sizes_in_blocks
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import (
    Blocks,
    Partial,
    Placement,
    ReduceOp,
    Replicate,
    Shard,
    segments_of,
)
from shardcore.domain.layouts.spec import (
    DimSpec,
    blocks_without,
    check_spec,
    entry_axes,
    spec_of,
    spec_of_placements,
    without_axes,
)

PartialAxes: TypeAlias = tuple[tuple[str, ReduceOp], ...]


def _partial(value: Mapping[str, ReduceOp] | PartialAxes) -> PartialAxes:
    return tuple(sorted(value.items() if isinstance(value, Mapping) else value))


def _blocks(value: Iterable[Blocks]) -> tuple[Blocks, ...]:
    return tuple(value)


@attrs.frozen(cache_hash=True)
class Layout:
    """A mesh and, per tensor dim, the axes that shard it.

    Args:
        mesh: The mesh that the axes belong to.
        spec: Per tensor dim None, an axis name, or a tuple of axis names, the major first.
        partial: Axes along which the values still have to be reduced, with the reduction.
        blocks: Per tensor dim the elements of a block, or `Segments`; all 1 by default. A dim that
            no axis shards has blocks of 1.

    Raises:
        LayoutError: If an axis is unknown or used twice, an entry is not a name, a reduction
            is unknown, two reductions do not commute (only "sum" and "avg" do), or there is not
            one block per dim.

    Example:
        >>> mesh = Mesh((2, 2), ("data", "model"))
        >>> layout = Layout(mesh, (None, ("model", "data")))
        >>> [str(placement) for placement in layout.placements]
        ['S(1)', 'S(1)']
        >>> layout.in_mesh_order
        False
        >>> layout.local_shape((3, 7), rank=3), layout.slices((3, 7), rank=3)
        ((3, 1), (slice(0, 3, None), slice(6, 7, None)))
    """

    mesh: Mesh
    spec: tuple[DimSpec, ...] = attrs.field(converter=spec_of)
    partial: PartialAxes = attrs.field(default=(), converter=_partial)
    blocks: tuple[Blocks, ...] = attrs.field(
        default=attrs.Factory(lambda self: (1,) * len(self.spec), takes_self=True),
        converter=_blocks,
    )

    def __attrs_post_init__(self) -> None:
        pending = [axis for axis, _ in self.partial]
        check_spec(self.spec, self.blocks, pending, self.mesh.axis_names, self)
        ops = {Partial(op).op for _, op in self.partial}
        if len(ops) > 1 and ops != {"sum", "avg"}:
            raise LayoutError(
                f"Layout {self} is partial by {sorted(ops)}, whose results depend on the order: "
                "redistribute all but one of these axes to Replicate() or Shard(dim) first."
            )

    @classmethod
    @lru_cache(maxsize=4096)
    def replicated(cls, mesh: Mesh, ndim: int) -> "Layout":
        """Builds the layout of a tensor with `ndim` dims that every rank holds in full."""
        return cls(mesh, (None,) * ndim)

    @classmethod
    def from_placements(cls, mesh: Mesh, placements: Iterable[Placement], ndim: int) -> "Layout":
        """Builds the layout with one placement per mesh axis: the inverse of `placements`.

        A dim that several axes shard is sharded in the order of the mesh axes, as in DTensor.

        Args:
            mesh: The mesh that the placements belong to.
            placements: One per mesh axis; negative dims count from the end.
            ndim: The number of tensor dims.

        Raises:
            LayoutError: If a dim is out of range, or the number of placements is not the number
                of axes.

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
        by_axis = dict(zip(mesh.axis_names, placements, strict=True))
        spec, blocks = spec_of_placements(by_axis, ndim)
        partial = {axis: p.op for axis, p in by_axis.items() if isinstance(p, Partial)}
        return cls(mesh, spec, partial, blocks)

    @property
    def ndim(self) -> int:
        """The number of tensor dims."""
        return len(self.spec)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the full tensor."""
        return not any(self.spec) and not self.partial

    def fitting(self, shape: Iterable[int], what: str) -> "Layout":
        """Checks that this layout has as many dims as `shape`, and returns it.

        Args:
            shape: The global shape.
            what: The name of the tensor, for the error: "Variable 'dense/kernel'".

        Raises:
            LayoutError: If it has another number of dims.
        """
        if self.ndim != len(sizes := tuple(shape)):
            raise LayoutError(
                f"{what} has shape {sizes}, but its layout {self} is of {self.ndim} dims: give one "
                "entry per dim, None where it is not sharded."
            )
        return self

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """The axes that shard tensor dim `dim`, the major first."""
        return entry_axes(self.spec[dim])

    def placement(self, axis: str) -> Placement:
        """The placement of the tensor along `axis`.

        Raises:
            MeshError: If the mesh has no such axis.
        """
        self.mesh.axis_index(axis)
        return self._by_axis[axis]

    @cached_property
    def _by_axis(self) -> dict[str, Placement]:
        """The placement along each mesh axis, in the order of the axes."""
        placements: dict[str, Placement] = dict.fromkeys(self.mesh.axis_names, Replicate())
        placements |= {axis: Partial(op) for axis, op in self.partial}
        for dim, (entry, block) in enumerate(zip(self.spec, self.blocks, strict=True)):
            for axis in entry_axes(entry):
                placements[axis] = Shard(dim, block)
        return placements

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement along each mesh axis, in the order of the axes.

        Placements do not contain the order of the axes that shard one dim: see `in_mesh_order`.
        """
        return tuple(self._by_axis.values())

    @property
    def in_mesh_order(self) -> bool:
        """Whether axes that shard one dim do so in the order of the mesh."""
        orders = map(list, map(entry_axes, self.spec))
        return all(order == sorted(order, key=self.mesh.axis_index) for order in orders)

    @lru_cache(maxsize=4096)  # noqa: B019 - layouts are few, and a step asks for each gradient
    def without(self, *axes: str) -> "Layout":
        """Removes `axes` from the dims that they shard.

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
        spec = without_axes(self.spec, *axes)
        blocks = blocks_without(self.spec, self.blocks, *axes)
        return Layout(self.mesh, spec, self.partial, blocks)

    @cached_property
    def reduced(self) -> "Layout":
        """This layout with every pending reduction done."""
        return Layout(self.mesh, self.spec, (), self.blocks) if self.partial else self

    def normalized(self, shape: Iterable[int]) -> "Layout":
        """Replaces blocks that shard a tensor of `shape` as blocks of 1 do by 1.

        Two normalized layouts with one spec are equal if they give every rank the same elements.

        Example:
            >>> layout = Layout(Mesh((2,), ("data",)), ("data", None), blocks=(4, 1))
            >>> layout.normalized((20, 3)).blocks, layout.normalized((24, 3)).blocks
            ((4, 1), (1, 1))
        """
        if set(self.blocks) <= {1}:
            return self
        blocks = (
            normal_blocks(size, self.ranks(dim), self.blocks[dim]) for dim, size in enumerate(shape)
        )
        return Layout(self.mesh, self.spec, self.partial, tuple(blocks))

    def ranks(self, dim: int) -> tuple[int, ...]:
        """The number of ranks along each axis that shards `dim`, the major first."""
        return tuple(self.mesh.axis_size(axis) for axis in self.dim_axes(dim))

    def chunk_sizes(self, dim: int, size: int) -> tuple[int, ...]:
        """Lists the sizes of all chunks of `dim`, which has `size` elements, in order.

        Example:
            >>> Layout(Mesh((2,), ("data",)), ("data",), blocks=(4,)).chunk_sizes(0, 20)
            (12, 8)
        """
        return sizes_in_blocks(size, self.ranks(dim), self.blocks[dim])

    @property
    def segments(self) -> tuple[int, ...]:
        """The number of segments of each tensor dim."""
        return tuple(segments_of(block).count for block in self.blocks)

    def local_shape(self, shape: Iterable[int], rank: int) -> tuple[int, ...]:
        """Computes the shape of the local shard of `rank`, of a tensor of global shape `shape`.

        Raises:
            LayoutError: If `shape` has another number of dims than the spec.
            MeshError: If the mesh has no such rank.
        """
        return tuple(size for _, size in self._held(tuple(shape), rank))

    def slices(self, shape: Iterable[int], rank: int) -> tuple[slice, ...]:
        """Computes the part of the global tensor that `rank` holds, as an index.

        An empty part begins at the end of its dim, as in torch.

        Raises:
            LayoutError: If `shape` has another number of dims than the spec, or a dim is sharded
                within segments, so that the local shard is not one piece.
            MeshError: If the mesh has no such rank.
        """
        if any(count > 1 for count in self.segments):
            raise LayoutError(
                f"Layout {self} shards a dim within segments: a local shard is not one piece. "
                "Ask for the slices of segments.without_segments()."
            )
        return tuple(slice(start, start + size) for start, size in self._held(tuple(shape), rank))

    def _held(self, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, int], ...]:
        """Finds per dim the start and the size of the shard of `rank`.

        A dim of several segments has no start.
        """
        self.fitting(shape, "A tensor")
        at = dict(zip(self.mesh.axis_names, self.mesh.coordinate(rank), strict=True))
        held = []
        for dim, size in enumerate(shape):
            coordinate = tuple(at[axis] for axis in self.dim_axes(dim))
            segments, elements = levels(size, self.ranks(dim), self.blocks[dim])
            outer = len(segments[1])
            _, several = chunk_at(*segments, coordinate[:outer])
            start, here = chunk_at(*elements, coordinate[outer:])
            held.append((start, several * here))
        return tuple(held)

    def __str__(self) -> str:
        pending = ", ".join(f"{op} over {axis!r}" for axis, op in self.partial)
        text = f"{self.spec} with {pending}" if pending else str(self.spec)
        blocks = ", ".join(map(str, self.blocks))
        return text if set(self.blocks) <= {1} else f"{text} in blocks of ({blocks})"
