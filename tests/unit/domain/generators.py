"""Hypothesis strategies for meshes, shapes and layouts."""

from hypothesis import strategies as st

from shardcore.domain.layout import Layout
from shardcore.domain.mesh import Mesh

AXES = ("data", "model", "expert")

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
    lambda shape: Mesh(shape, AXES[: len(shape)])
)
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
partial_ops = st.sampled_from(
    [("sum",), ("avg",), ("sum", "avg"), ("max",), ("min",), ("product",)]
)


@st.composite
def layouts(draw, mesh: Mesh, ndim: int, pending: bool = True) -> Layout:
    """Any layout: each axis, in any order, splits some dim, is partial, or does nothing."""
    ops = draw(partial_ops)
    split: list[list[str]] = [[] for _ in range(ndim)]
    partial = {}
    for axis in draw(st.permutations(mesh.axis_names)):
        where = draw(st.sampled_from(["whole", *(["partial"] if pending else []), *range(ndim)]))
        if where == "partial":
            partial[axis] = draw(st.sampled_from(ops))
        elif where != "whole":
            split[where].append(axis)
    return Layout(mesh, split, partial)


@st.composite
def layouts_and_shapes(draw, pending: bool = True) -> tuple[Layout, tuple[int, ...]]:
    shape = draw(shapes)
    return draw(layouts(draw(meshes), len(shape), pending)), shape


@st.composite
def redistributions(draw) -> tuple[Layout, Layout, tuple[int, ...]]:
    """A source, a target that keeps none, some or all of its pending reductions, and a shape."""
    source, shape = draw(layouts_and_shapes())
    target = draw(layouts(source.mesh, len(shape), pending=False))
    kept = {axis: op for axis, op in source.partial if draw(st.booleans())}
    return source, Layout(source.mesh, target.without(*kept).spec, kept), shape
