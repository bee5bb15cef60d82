"""A rule over all ranks, in NumPy: what every rank computes from its parts, beside the whole."""

from collections.abc import Callable

import attrs
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from shardcore.domain.layout import Layout
from shardcore.domain.mesh import Mesh
from shardcore.domain.operator_rules import OperatorRule
from shardcore.domain.operator_rules_choice import Placed, split
from shardcore.domain.placements import Partial, Replicate, Shard
from tests.unit.domain.numpy_mesh import coordinates, scatter

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

    def operands(self, seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [rng.normal(size=shape) for shape in self.shapes]


def as_indices(values, upto):
    """Real numbers as places below `upto`."""
    return np.floor(np.abs(values) * 1000).astype(int) % upto


@st.composite
def placements(draw, mesh, rule, shapes, factor):
    """Per operand: on some axis split by `factor` if it has that, else anything."""
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
    placed = tuple(Placed(shape, each, 8) for shape, each in zip(call.shapes, sources, strict=True))
    whole = [np.asarray(each) for each in call.run(operands)]
    shapes = tuple(each.shape for each in whole)
    chosen = split(call.rule, mesh.shape, placed, shapes)

    held = [
        laid_out(mesh, value, where) for value, where in zip(operands, chosen.operands, strict=True)
    ]
    parts = {at: call.run([each[at] for each in held]) for at in coordinates(mesh)}
    for number, (term, where) in enumerate(zip(call.rule.results, chosen.results, strict=True)):
        found = {at: np.asarray(results[number]) for at, results in parts.items()}
        layout = Layout.from_placements(mesh, where, len(shapes[number]))
        for rank, (at, part) in enumerate(found.items()):
            assert part.shape == layout.local_shape(shapes[number], rank)
            assert chosen.global_shape(term, part.shape, mesh.shape, at) == shapes[number]
        np.testing.assert_allclose(together(mesh, found, where), whole[number], atol=1e-9)


def laid_out(mesh, value, where):
    """What each rank has of `value`. Of a pending sum the first rank of an axis has all."""
    layout = Layout.from_placements(mesh, where, value.ndim)
    contributions = np.zeros((*[mesh.axis_size(axis) for axis, _ in layout.partial], *value.shape))
    contributions[(0,) * len(layout.partial)] = value
    held = scatter(layout, contributions)
    assert all(part.size for part in held.values()), f"an empty part of {value.shape} as {where}"
    return held


def together(mesh, parts, where):
    """The whole that ranks have parts of, joined from the last axis to the first."""
    for axis in reversed(range(mesh.ndim)):
        groups = {}
        for at in sorted(parts):
            groups.setdefault(at[:axis], []).append(parts[at])
        parts = {at: joined(group, where[axis]) for at, group in groups.items()}
    return parts[()]


def joined(group, placement):
    match placement:
        case Shard(dim):
            return np.concatenate(group, dim)
        case Partial():
            return np.sum(group, axis=0)
    for each in group[1:]:
        np.testing.assert_allclose(each, group[0], atol=1e-9)
    return group[0]
