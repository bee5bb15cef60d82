"""Which placements of a view are those of what is viewed: compared element by element."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

import shardcore
from shardcore.adapters.torch_compat.dtensor.strided import cuts_alike
from shardcore.testing import run_ranks
from tests.distributed.programs import distribute

SHAPES = [(24,), (4, 6), (6, 4), (2, 12), (2, 3, 4), (4, 3, 2), (1, 24), (2, 2, 6), (3, 8), (8, 3)]


def placements(shape):
    dims = st.integers(0, len(shape) - 1)
    strided = st.builds(_StridedShard, dims, split_factor=st.sampled_from([2, 3, 4, 8]))
    return st.one_of(st.just(Replicate()), st.builds(Shard, dims), strided)


@st.composite
def specs(draw):
    """Two shapes of as many elements on one mesh, each with placements."""
    mesh = draw(st.sampled_from([(2,), (3,), (2, 2), (1, 2), (2, 3)]))
    found = []
    for _ in range(2):
        shape = draw(st.sampled_from(SHAPES))
        chosen = tuple(draw(placements(shape)) for _ in mesh)
        found.append(
            SimpleNamespace(shape=shape, mesh=SimpleNamespace(shape=mesh), placements=chosen)
        )
    return found


def chunks(values, parts, dim):
    """As torch.chunk, with empty ones at the end: all but the last are of one size."""
    size = -(-values.shape[dim] // parts)
    return [
        values.take(
            range(min(i * size, values.shape[dim]), min((i + 1) * size, values.shape[dim])), dim
        )
        for i in range(parts)
    ]


def part(spec, rank):
    """The elements of the rank at that place in the mesh, by their places in the whole."""
    values = np.arange(np.prod(spec.shape)).reshape(spec.shape)
    for ranks, at, placement in zip(spec.mesh.shape, rank, spec.placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        pieces = chunks(values, getattr(placement, "split_factor", 1), placement.dim)
        dealt = [chunks(piece, ranks, placement.dim)[at] for piece in pieces]
        values = np.concatenate(dealt, placement.dim)
    return values.ravel()


def is_even(spec):
    """Whether every cut is into parts of one size."""
    shape = list(spec.shape)
    for ranks, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        if not isinstance(placement, Replicate):
            if shape[placement.dim] % (ranks * getattr(placement, "split_factor", 1)):
                return False
            shape[placement.dim] //= ranks
    return True


@settings(max_examples=500)
@given(specs())
def test_what_is_cut_alike_gives_each_rank_the_same_elements(both):
    one, other = both
    same = all(
        np.array_equal(part(one, rank), part(other, rank)) for rank in np.ndindex(one.mesh.shape)
    )
    if cuts_alike(one, other):
        assert same
    elif is_even(one) and is_even(other):
        assert not same


# The shape and its layout, and the shapes that it is brought into, one after the other.
RESHAPED = [
    ((4, 8), (None, "model"), [(32,), (2, 16)]),
    ((4, 8), (None, "model"), [(32,), (4, 8)]),
    ((4, 8), ("data", "model"), [(32,), (8, 4), (4, 8)]),
    ((1, 2, 3, 4), (None, None, "model", None), [(1, 6, 4), (1, 24)]),
    ((2, 3, 4), ("data", "model", None), [(6, 4), (1, 6, 4), (1, 24)]),
    ((4, 4, 8), (None, ("model", "data"), None), [(16, 8), (128,)]),
    ((4, 4, 8), (None, None, ("model", "data")), [(4, 32), (4, 4, 2, 4)]),
]


def test_reshapes_of_reshapes_have_the_elements_of_the_whole():
    def program(rank):
        distribution = distribute((2, 2))
        with distribution.scope():
            return [reshaped(*case) for case in RESHAPED]

    def reshaped(shape, spec, shapes):
        whole = np.arange(np.prod(shape), dtype="float32")
        tensor = shardcore.distribute_tensor(whole.reshape(shape), spec)
        for each in shapes:
            tensor = tensor.reshape(each)
        return tensor.full_tensor().numpy()

    for results in run_ranks(program, 4):
        for found, (shape, _, shapes) in zip(results, RESHAPED, strict=True):
            np.testing.assert_array_equal(found, np.arange(np.prod(shape)).reshape(shapes[-1]))


def test_the_places_of_the_largest_where_another_dim_is_split_in_strides():
    values = np.random.default_rng(0).normal(size=(4, 6, 5)).astype("float32")

    def program(rank):
        with distribute((2, 2)).scope():
            tensor = shardcore.distribute_tensor(values, (None, "data", None)).reshape(24, 5)
            return [
                each.full_tensor().numpy() for each in (tensor.argmax(1), tensor.argmin(1, True))
            ]

    flat = values.reshape(24, 5)
    for largest, smallest in run_ranks(program, 4):
        np.testing.assert_array_equal(largest, flat.argmax(1))
        np.testing.assert_array_equal(smallest, flat.argmin(1, keepdims=True))
