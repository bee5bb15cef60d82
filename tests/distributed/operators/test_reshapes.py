"""Reshapes that join sharded dims, one after the other, on a mesh of two axes."""

import numpy as np
import pytest
import torch

import shardcore
from shardcore.adapters.engine.redistribution import find_copy
from shardcore.domain.errors import ShardedTensorError
from shardcore.testing import run_ranks
from tests.distributed.programs import distribute

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


def test_the_places_of_the_largest_where_another_dim_was_joined():
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


def test_a_copy_in_another_layout_is_reshaped_too():
    values = np.random.default_rng(0).normal(size=(4, 3, 6)).astype("float32")

    def program(rank):
        with distribute((2, 2)).scope():
            tensor = shardcore.distribute_tensor(values, ("data", "model", None))
            largest = tensor.sort(1).values  # of a copy with other columns on each rank
            flat = tensor.reshape(12, 6)
            copy = find_copy(flat).tensor
            assert copy.mesh_layout != flat.mesh_layout
            return [each.full_tensor().numpy() for each in (largest, flat, copy)]

    expected = np.sort(values, 1), values.reshape(12, 6), values.reshape(12, 6)
    for found in run_ranks(program, 4):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_as_strided_of_a_view_that_is_not_contiguous_is_refused_and_of_a_copy_right():
    """Its strides are those of memory that no rank has."""
    values = np.arange(18, dtype="float32").reshape(6, 3)

    def program(rank):
        with distribute((2, 1)).scope():
            tensor = shardcore.distribute_tensor(values, ("data", None))
            with pytest.raises(ShardedTensorError, match=r"give it x\.contiguous\(\)"):
                torch.as_strided(tensor.t(), (2, 2), (1, 3))
            copied = torch.as_strided(tensor.t().contiguous(), (2, 2), (1, 6))
            return copied.full_tensor().numpy()

    for found in run_ranks(program, 2):
        np.testing.assert_array_equal(found, values[:2, :2])
