"""Rearrangements of files' tensors: each part of a variable has its own elements of the file."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.checkpoints.grid import Box
from shardcore.domain.checkpoints.rearrangement import rearrangement
from shardcore.domain.errors import ArgumentProblem

SIZES = {"a": 2, "b": 3, "c": 4, "d": 2}


@st.composite
def dims(draw):
    names = draw(st.permutations(list(SIZES)))
    cuts = [0, *sorted(draw(st.sets(st.integers(1, 3)))), 4]
    return [names[begin:end] for begin, end in itertools.pairwise(cuts)]


def text(side):
    return " ".join(f"({' '.join(names)})" for names in side)


@st.composite
def cases(draw):
    file, variable = draw(dims()), draw(dims())
    part = []
    for names in variable:
        size = int(np.prod([SIZES[name] for name in names]))
        begin = draw(st.integers(0, size))
        part.append((begin, draw(st.integers(begin, size))))
    return file, variable, part


@given(cases())
def test_the_pieces_of_a_part_have_its_elements_each_once(case):
    """NumPy rearranges the full tensor."""
    file, variable, part = case
    order = [name for names in file for name in names]
    flat = np.arange(48).reshape([SIZES[name] for name in order])
    shape = [int(np.prod([SIZES[name] for name in names])) for names in file]
    permuted = flat.transpose([order.index(name) for names in variable for name in names])
    full = permuted.reshape([int(np.prod([SIZES[n] for n in names])) for names in variable])
    sized = " ".join(f"({' '.join(f'{name}={SIZES[name]}' for name in names)})" for names in file)
    parsed = rearrangement(f"{sized} -> {text(variable)}", full.shape, shape)
    assert parsed == rearrangement(f"{sized} -> {text(variable)}", full.shape)
    target = np.full(full.shape, -1)
    box = Box(tuple(a for a, _ in part), tuple(b - a for a, b in part))
    for pair in parsed.box_pairs(box):
        read = flat.reshape(shape)[pair.file.slices]
        moved = read.reshape(pair.factors).transpose(pair.order).reshape(pair.variable.shape)
        assert (target[pair.variable.slices] == -1).all()
        target[pair.variable.slices] = moved
    np.testing.assert_array_equal(target[box.slices], full[box.slices])
    assert (target >= 0).sum() == box.elements


@pytest.mark.parametrize(
    ("pattern", "shape", "file", "message"),
    [
        ("a b", (2, 3), None, "each word once"),
        ("a b -> a c", (2, 3), None, "each word once"),
        ("a a -> a a", (2, 2), None, "each word once"),
        ("(a b -> b a", (2, 2), None, "each word once"),
        ("a+b -> a b", (2, 2), None, "each word once"),
        ("a b -> b a", (2, 3, 4), None, "has 3 dims"),
        ("a b -> (a b)", (6,), None, "write them, as a=8"),
        ("a=4 b -> (a b)", (6,), None, "write them, as b=8"),
        ("a=4 b -> a b", (2, 3), None, "does not make"),
        ("a b -> b a", (2, 3), (2, 3), r"in the file, expected \(3, 2\)"),
        (None, (2, 3), (3, 2), r"in the file, expected \(2, 3\)"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused(pattern, shape, file, message):
    with pytest.raises(ArgumentProblem, match=message):
        rearrangement(pattern, shape, file)


def test_sizes_come_from_either_shape():
    assert rearrangement("a b -> (a b)", (6,), (2, 3)).file_shape == (2, 3)
    assert rearrangement("(o i) () -> i o", (3, 2)).file_shape == (6, 1)
    assert rearrangement("a -> a", (0,)).file_shape == (0,)
