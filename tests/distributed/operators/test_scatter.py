"""`keras.ops.scatter` in one call, and the confusion matrices that are made by it."""

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.programs import assert_close, distribute
from tests.fallbacks import fallbacks, forget_fallbacks

RNG = np.random.default_rng(0)
CLASSES = 4
IMAGES = RNG.normal(size=(6, 4, 4, 3)).astype("float32")
LABELS = RNG.integers(0, CLASSES, (6, 4, 4))

# By name: the indices, the values, and the shape of what they are added up in.
CALLS = {
    "numbers": (RNG.integers(0, 5, (40, 1)), RNG.normal(size=40), (5,)),
    "from the end": ([[-1], [0], [-1]], np.array([1.0, 2.0, 3.0]), (3,)),
    "cells": (RNG.integers(0, 3, (30, 2)), RNG.normal(size=30), (3, 3)),
    "rows": (RNG.integers(0, 3, (9, 1)), RNG.normal(size=(9, 4)), (3, 4)),
    "of several dims": (RNG.integers(0, 3, (2, 7, 2)), RNG.normal(size=(2, 7)), (3, 3)),
    "integers": (RNG.integers(0, 3, (9, 1)).astype("int8"), RNG.integers(0, 9, 9), (3,)),
    "many": (np.zeros((100_000, 1), int), np.full(100_000, 0.1, "float32"), (2,)),
}


def added(indices, values, shape):
    """The result by definition."""
    indices = np.asarray(indices)
    result = np.zeros(shape, "float64")
    at = tuple(np.moveaxis(indices.reshape(-1, indices.shape[-1]), -1, 0))
    np.add.at(result, at, np.asarray(values).reshape(-1, *shape[indices.shape[-1] :]))
    return result


def test_the_values_are_added_up():
    def program(rank):
        shardcore.install("single")
        found = {name: keras.ops.scatter(*call) for name, call in CALLS.items()}
        with pytest.raises(IndexError):
            keras.ops.scatter([[3]], np.ones(1), (3,))
        return {name: (str(each.dtype), each.numpy()) for name, each in found.items()}

    (found,) = run_ranks(program, 1)
    for name, (dtype, value) in found.items():
        np.testing.assert_allclose(value, added(*CALLS[name]), rtol=1e-6, atol=1e-6, err_msg=name)
        assert ("int" in dtype) == (name == "integers")


def segmented(mesh):
    if mesh:
        distribute(mesh)
    else:
        shardcore.install("single")
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4, 4, 3)), keras.layers.Conv2D(CLASSES, 3, padding="same")]
    )
    model.compile(
        "sgd",
        keras.losses.SparseCategoricalCrossentropy(True),
        metrics=[keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False)],
    )
    forget_fallbacks()
    losses = [model.train_on_batch(IMAGES, LABELS) for _ in range(4)]
    with count_collectives() as traffic:
        losses.append(model.train_on_batch(IMAGES, LABELS))
    steps = model.train_function.captured
    captured = [bool(each.programs) for each in steps._entries.values()]
    return {"losses": np.array(losses)}, dict(traffic.calls), captured, dict(fallbacks())


def test_a_confusion_matrix_is_a_pending_sum_of_each_ranks_rows():
    def program(rank, mesh):
        return segmented(mesh)

    ((one, *_),) = run_ranks(program, 1, None)
    for found, calls, captured, fell_back in run_ranks(program, 2, (2, 1)):
        assert_close([found], one)
        # The gradients with the loss; the matrix, which is one of integers. No label is gathered.
        assert calls == {"all_reduce": 2}
        assert (captured, fell_back) == ([True], {})


NUMBERS = np.array([2, 0, -1, 2, 5, 1, 0])  # one before the first segment, one behind the last
ROWS = RNG.integers(-4, 5, (7, 2, 3))


def segments(mesh):
    """The sums of segments as Keras gives them, or of shards; the fall-backs, and what moves."""
    if mesh:
        distribute(mesh)
    found, moved = {}, []
    for dtype in ("float32", "float16", "int32"):
        rows, numbers = (
            shardcore.ensure_dtensor_input(torch.as_tensor(each)) if mesh else torch.as_tensor(each)
            for each in (ROWS.astype(dtype), NUMBERS)
        )
        forget_fallbacks()
        with count_collectives() as traffic:
            total = keras.ops.segment_sum(rows, numbers, num_segments=4)
        moved.append((dict(traffic.calls), dict(fallbacks())))
        found[dtype] = keras.ops.convert_to_numpy(total)
        some = keras.ops.segment_sum(rows, keras.ops.maximum(numbers, 0))  # of any number
        found[f"{dtype}, any"] = keras.ops.convert_to_numpy(some)
        largest = keras.ops.segment_max(rows, numbers, num_segments=4)
        found[f"{dtype}, largest"] = keras.ops.convert_to_numpy(largest)
    return found, moved


def test_each_rank_adds_its_rows_to_segments():
    ((expected, _),) = run_ranks(lambda rank: segments(None), 1)
    for found, moved in run_ranks(lambda rank: segments((2, 1)), 2):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        # A sum of integers stays pending until it is read.
        assert moved == [({"all_reduce": 1}, {}), ({"all_reduce": 1}, {}), ({}, {})]
