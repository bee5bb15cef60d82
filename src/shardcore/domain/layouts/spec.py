"""Specs: per tensor dim, the mesh axes that shard it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import attrs

from shardcore.domain.errors import LayoutError
from shardcore.domain.layouts.placements import Blocks, Placement, Segments, Shard, segments_of

DimSpec: TypeAlias = str | tuple[str, ...] | None


def dim_spec(entry: object) -> DimSpec:
    """Normalizes an entry for no axis, one, or a sequence of axes."""
    axes = tuple(entry) if isinstance(entry, list | tuple) else (entry,)
    if axes in ((), (None,)):
        return None
    for axis in axes:
        if not isinstance(axis, str):
            raise LayoutError(
                f"A spec entry is None, an axis name or a tuple of axis names, got {entry!r}.",
                got=repr(entry),
            )
    return axes[0] if len(axes) == 1 else axes


def spec_of(value: Iterable[object]) -> tuple[DimSpec, ...]:
    """Normalizes a list or a tuple of entries, one per tensor dim."""
    if not isinstance(value, list | tuple):
        raise LayoutError(
            f"A spec is a tuple with one entry per tensor dim, got {value!r}.", got=repr(value)
        )
    return tuple(dim_spec(entry) for entry in value)


def spec_of_placements(
    placements: Mapping[str, Placement], ndim: int
) -> tuple[tuple[DimSpec, ...], tuple[Blocks, ...]]:
    """Converts placements by axis to the spec and the blocks of a tensor with `ndim` dims.

    A dim that several axes shard is sharded in the order of `placements`.

    Raises:
        LayoutError: If a dim is out of range, or axes that shard one dim have blocks of two sizes.

    Example:
        >>> spec_of_placements({"data": Shard(-1), "model": Shard(1)}, ndim=2)
        ((None, ('data', 'model')), (1, 1))
    """
    sharded: list[tuple[str, ...]] = [()] * ndim
    blocks: list[Blocks] = [1] * ndim
    for axis, placement in placements.items():
        if not isinstance(placement, Shard):
            continue
        if not -ndim <= placement.dim < ndim:
            raise LayoutError(
                f"Axis {axis!r} shards dim {placement.dim}, but the tensor has {ndim} dims, "
                "numbered from 0.",
                name=axis,
            )
        dim = placement.dim % ndim
        if sharded[dim] and blocks[dim] != placement.block:
            raise LayoutError(
                f"Dim {dim} is sharded in blocks of {blocks[dim]} and of {placement.block}: "
                "all axes that shard one dim have blocks of one size."
            )
        sharded[dim], blocks[dim] = (*sharded[dim], axis), placement.block
    return spec_of(sharded), tuple(blocks)


def entry_axes(entry: DimSpec) -> tuple[str, ...]:
    """The axes of an entry of a spec, the major first."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry


def named_axes(axes: Iterable[str]) -> str:
    """Writes the names of axes for a message.

    Example:
        >>> named_axes(("data",)), named_axes(("replica", "shard"))
        ("axis 'data'", "axes 'replica', 'shard'")
    """
    names = list(map(repr, axes))
    return f"axis {names[0]}" if len(names) == 1 else f"axes {', '.join(names)}"


def check_spec(
    spec: Sequence[DimSpec],
    blocks: Sequence[Blocks],
    pending: Iterable[str],
    known: Sequence[str],
    layout: object,
) -> None:
    """Checks the spec of `layout`, with the blocks of its dims and the axes it is partial along.

    Raises:
        LayoutError: If there is not one fitting block per dim, or an axis is not one of `known`,
            those of the mesh, or is used twice. It names `layout`.
    """
    if len(blocks) != len(spec):
        raise LayoutError(
            f"Layout {layout} needs one block per dim, got {blocks}.", got=str(blocks)
        )
    for entry, block in zip(spec, blocks, strict=True):
        if segments_of(block).block < 1 or (entry is None and block != 1):
            raise LayoutError(
                f"Layout {layout} has blocks {blocks}: a sharded dim has blocks of 1 or more "
                "elements, any other of 1."
            )
    used = [*(axis for entry in spec for axis in entry_axes(entry)), *pending]
    for axis in used:
        if axis not in known:
            raise LayoutError(
                f"Layout {layout} names axis {axis!r}, but the axes of its mesh are {known}.",
                name=axis,
            )
        if used.count(axis) > 1:
            raise LayoutError(
                f"Layout {layout} uses axis {axis!r} twice: use each axis once.", name=axis
            )


def without_axes(spec: Iterable[DimSpec], *axes: str) -> tuple[DimSpec, ...]:
    """Removes `axes` from the dims that they shard.

    Example:
        >>> without_axes((("data", "model"), "data"), "data")
        ('model', None)
    """
    return tuple(
        dim_spec([axis for axis in entry_axes(entry) if axis not in axes]) for entry in spec
    )


def blocks_without(
    spec: Iterable[DimSpec], blocks: Iterable[Blocks], *axes: str
) -> tuple[Blocks, ...]:
    """Computes the blocks of a layout of `spec` once `axes` shard no dim.

    Example:
        >>> from shardcore.domain.layouts.placements import Segments
        >>> blocks_without((("data", "model"),), (Segments(4, outer=1),), "data")
        (Segments(count=4, block=1, outer=0, outer_block=1),)
    """
    remaining: list[Blocks] = []
    for entry, block in zip(spec, blocks, strict=True):
        stay = [axis not in axes for axis in entry_axes(entry)]
        left: Blocks = block if any(stay) else 1
        if isinstance(left, Segments) and left.outer:
            outer = sum(stay[: left.outer])
            left = attrs.evolve(left, outer=outer, outer_block=left.outer_block if outer else 1)
        remaining.append(left)
    return tuple(remaining)
