"""Pieces: row-major order, blocks of 16, and what a rank holds of each."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.layouts.memory_order import BLOCK, overlap, pieces

SHAPES = (
    st.lists(st.sampled_from([1, 2, 3, 5, 16, 32, 40]), min_size=1, max_size=4)
    .map(tuple)
    .filter(lambda shape: math.prod(shape) < 3000)
)


def elements(piece):
    return math.prod(each.stop - each.start for each in piece)


def indices(piece, shape):
    """The elements of a piece, by their number in row-major order."""
    found = [0]
    for each, size in zip(piece, shape, strict=True):
        found = [at * size + place for at in found for place in range(each.start, each.stop)]
    return found


@given(SHAPES, st.integers(16, 300))
def test_pieces_are_all_elements_in_order_in_whole_blocks(shape, most):
    found = list(pieces(shape, most))
    seen = [at for piece in found for at in indices(piece, shape)]
    assert seen == list(range(math.prod(shape)))
    assert all(elements(piece) % BLOCK == 0 for piece in found[:-1])
    assert len(found) == 1 or elements(found[-1]) >= BLOCK


@pytest.mark.parametrize("shape", [(1000, 64), (3, 1000, 64), (5, 7, 4096), (100_000,)])
def test_no_piece_is_much_larger_than_asked(shape):
    assert max(map(elements, pieces(shape, 4096))) < 2 * 4096


@given(SHAPES, st.integers(16, 300), st.data())
def test_the_overlaps_of_all_pieces_are_the_part_that_is_held(shape, most, data):
    held = tuple(
        slice(*sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))))
        for size in shape
    )
    part = tuple(each.stop - each.start for each in held)
    taken = []
    for piece in pieces(shape, most):
        source, target = overlap(piece, held)
        assert all(0 <= each.start <= each.stop for each in (*source, *target))
        assert elements(source) == elements(target)
        taken += indices(target, part)
    assert sorted(taken) == list(range(math.prod(part)))
