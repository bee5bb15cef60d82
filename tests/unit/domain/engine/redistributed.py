"""A redistribution: the kinds of its steps, and which rank has which elements."""

import numpy as np
from hypothesis import strategies as st

from shardcore.domain.engine.redistribution import plan
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from tests.unit.domain.generators import block_sizes, redistributions

MESH = Mesh((2, 4), ("data", "model"))


def contributions_to(layout, shape, seed):
    sizes = [layout.mesh.axis_size(axis) for axis, _ in layout.partial]
    # Small and never zero, so that no reduction hides another.
    return np.random.default_rng(seed).choice([1.0, 2.0, -1.0, 3.0], size=(*sizes, *shape))


def owners(layout, shape):
    """Per rank, which elements of the global tensor it holds."""
    masks = np.zeros((layout.mesh.size, *shape), dtype=bool)
    for rank in range(layout.mesh.size):
        masks[(rank, *layout.slices(shape, rank))] = True
    return masks


@st.composite
def single_axis_changes(draw):
    """Two layouts that differ in what one axis, the last of its dims, does."""
    source, _, shape = draw(redistributions())
    pending = dict.fromkeys(dict(source.partial), "sum")
    source = Layout(source.mesh, source.spec, pending, source.blocks)
    axis = draw(st.sampled_from(source.mesh.axis_names))
    fixed = source.without(axis)
    rest = {a: op for a, op in source.partial if a != axis}

    def placed(where):
        of_dims = [
            fixed.dim_axes(dim) + ((axis,) if dim == where else ()) for dim in range(len(shape))
        ]
        # Blocks can be others only where no other axis shards the dim.
        blocks = [
            draw(block_sizes) if dim == where and not fixed.spec[dim] else fixed.blocks[dim]
            for dim in range(len(shape))
        ]
        pending = rest | ({axis: "sum"} if where == "partial" else {})
        return Layout(source.mesh, of_dims, pending, blocks)

    places = ["whole", *range(len(shape))]
    before = draw(st.sampled_from([*places, "partial"]))
    after = draw(st.sampled_from(places))
    return axis, placed(before), placed(after), shape


def kinds(source, target, shape=(8, 8), itemsize=4):
    return [(step.kind, step.axis) for step in plan(source, target, shape, itemsize)]
