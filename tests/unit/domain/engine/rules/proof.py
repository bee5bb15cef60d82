"""A rule over all ranks, in NumPy: what ranks compute from their shards, beside the full result."""

from collections.abc import Callable

import attrs
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from shardcore.domain.engine.call import PlacedTensor
from shardcore.domain.engine.choice import choose
from shardcore.domain.engine.rules.rule import OperatorRule
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import Partial, Replicate, Segments, Shard
from shardcore.testing.simulated_ranks import check_shards

sizes = st.sampled_from([4, 3, 5, 2, 6, 1])
meshes = st.sampled_from([(2,), (3,), (2, 2), (2, 3), (1, 2), (4,)]).map(
    lambda shape: Mesh(shape, ("data", "model")[: len(shape)])
)


@attrs.frozen
class Call:
    """A rule, and the call of an operator that it is for."""

    rule: OperatorRule
    shapes: list[tuple[int, ...]]
    run: Callable[[list[np.ndarray]], list[np.ndarray]]
    reshapes: bool = False  # whether a rank gives its part the shape that a part of the result has

    def operands(self, seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [rng.normal(size=shape) for shape in self.shapes]


# Functions of those modules that compute what a rule needs.
HELPERS = {"attention_dims", "source_dims", "windows"}


def names_of_rules(module):
    """The functions of a module of rules that give one."""
    found = {name: each for name, each in vars(module).items() if name.islower() and callable(each)}
    return {
        name
        for name, each in found.items()
        if each.__module__ == module.__name__ and not name.startswith("_")
    } - HELPERS


REDUCTIONS = {"sum": np.sum, "max": np.max, "min": np.min, "product": np.prod}


def as_indices(values, upto):
    """Real numbers as places below `upto`."""
    return np.floor(np.abs(values) * 1000).astype(int) % upto


@st.composite
def placements(draw, mesh, rule, shapes, factor):
    """Per operand: on some axis sharded by `factor` if it has that, else anything."""
    special = draw(st.integers(0, mesh.ndim - 1))

    def placement(term, shape, axis):
        if axis == special and factor in term.factors:
            return Shard(term.dim_of(factor))
        anything = [Replicate(), Partial(), *map(Shard, range(len(shape)))]
        return draw(st.sampled_from(anything[: 1 if axis == special else None]))

    return [
        tuple(placement(term, shape, axis) for axis in range(mesh.ndim))
        for term, shape in zip(rule.operands, shapes, strict=True)
    ]


def prove(call, factor, data):
    """The operator on the parts of all ranks gives the parts of its result."""
    assume(any(factor in term.factors for term in call.rule.operands))
    mesh = data.draw(meshes)
    operands = call.operands(data.draw(st.integers(0, 99)))
    sources = data.draw(placements(mesh, call.rule, call.shapes, factor))
    layouts = [
        in_blocks(data, mesh, shape, each) for shape, each in zip(call.shapes, sources, strict=True)
    ]
    placed = tuple(
        PlacedTensor(shape, layout, 8, data.draw(st.booleans()))
        for shape, layout in zip(call.shapes, layouts, strict=True)
    )
    full = [np.asarray(each) for each in call.run(operands)]
    shapes = tuple(each.shape for each in full)
    chosen = choose(call.rule, placed, shapes)

    def run(parts, rank):
        local = chosen.results[0].local_shape(shapes[0], rank)
        results = [parts[0].reshape(local)] if call.reshapes else call.run(parts)
        results = list(map(np.asarray, results))
        for number, (term, part) in enumerate(zip(call.rule.results, results, strict=True)):
            assert chosen.global_shape(term, part.shape) == shapes[number]
        return results

    check_shards(
        run,
        list(zip(operands, chosen.operands, strict=True)),
        list(zip(full, chosen.results, strict=True)),
    )


def in_blocks(data, mesh, shape, where):
    """A layout of those placements: sharded dims in blocks of any size, by their axes in any order.

    It is normalized, as the layouts of all tensors are.
    """
    layout = Layout.from_placements(mesh, where, len(shape))
    axes_of_dims = [data.draw(st.permutations(layout.dim_axes(dim))) for dim in range(len(shape))]
    blocks = [
        data.draw(st.sampled_from(ways_to_shard(size, len(axes)))) if axes else 1
        for axes, size in zip(axes_of_dims, shape, strict=True)
    ]
    return Layout(mesh, axes_of_dims, layout.partial, blocks).normalized(shape)


def ways_to_shard(size, axes):
    """Blocks of some sizes, and segments of them, sharded by some of so many axes."""
    counts = [count for count in (2, 3, 4) if not size % count]
    segments = [Segments(count, block) for count in counts[:2] for block in (1, 2)]
    axes_of_dims = [
        Segments(count, block, outer, together)
        for count in counts
        for outer in range(1, axes)
        for block, together in ((1, 1), (2, 1), (1, 2))
    ]
    return [1, 2, 3, *segments, *axes_of_dims]
