"""Hypothesis strategies for meshes, shapes and layouts."""

from hypothesis import strategies as st

from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh

AXES = ("data", "model", "expert")

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
    lambda shape: Mesh(shape, AXES[: len(shape)])
)
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
block_sizes = st.integers(1, 4)
partial_ops = st.sampled_from(
    [("sum",), ("avg",), ("sum", "avg"), ("max",), ("min",), ("product",)]
)


@st.composite
def layouts(draw, mesh: Mesh, ndim: int, pending: bool = True, blocks: bool = False) -> Layout:
    """Any layout: each axis, in any order, shards some dim, is partial, or does nothing.

    With `blocks`, dims that are sharded are so in blocks of 1 to 4 elements.
    """
    ops = draw(partial_ops)
    axes_of_dims: list[list[str]] = [[] for _ in range(ndim)]
    partial = {}
    for axis in draw(st.permutations(mesh.axis_names)):
        where = draw(st.sampled_from(["whole", *(["partial"] if pending else []), *range(ndim)]))
        if where == "partial":
            partial[axis] = draw(st.sampled_from(ops))
        elif where != "whole":
            axes_of_dims[where].append(axis)
    sizes = [draw(block_sizes) if axes and blocks else 1 for axes in axes_of_dims]
    return Layout(mesh, axes_of_dims, partial, sizes)


@st.composite
def layouts_and_shapes(
    draw, pending: bool = True, blocks: bool = False
) -> tuple[Layout, tuple[int, ...]]:
    shape = draw(shapes)
    return draw(layouts(draw(meshes), len(shape), pending, blocks)), shape


@st.composite
def redistributions(draw) -> tuple[Layout, Layout, tuple[int, ...]]:
    """A source, a target that keeps none, some or all of its pending reductions, and a shape.

    Both are in blocks.
    """
    source, shape = draw(layouts_and_shapes(blocks=True))
    target = draw(layouts(source.mesh, len(shape), pending=False, blocks=True))
    kept = {axis: op for axis, op in source.partial if draw(st.booleans())}
    target = target.without(*kept)
    return source, Layout(source.mesh, target.spec, kept, target.blocks), shape
