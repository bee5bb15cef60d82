"""Fully sharded: weights are gathered, at most twice; gradients are reduce-scattered, once."""

import keras
import numpy as np
import pytest

from shardcore.testing import run_ranks
from tests.distributed.models import cnn, decoder, mlp
from tests.distributed.moved import DATA, assert_same, compiled, distribute, lstm, trained

MODELS = (mlp, cnn, lstm, decoder)


def every_model(rank, mesh=None):
    found = {}
    for build in MODELS:
        keras.utils.clear_session(free_memory=False)
        if mesh:
            distribute(build, mesh, policy="fully_sharded", small=0)
        found[build.__name__] = trained(build, DATA[build])
    return found


@pytest.fixture(scope="module")
def one_device():
    (found,) = run_ranks(every_model, 1)
    return {name: values for name, (values, _, _) in found.items()}


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(every_model, 2, (2, 1), timeout=120)


def padded_bytes(shape):
    """Two chunks, along the largest dim that is even; if none is, the second chunk is padded."""
    size = 4 * int(np.prod(shape))
    return size if any(dim % 2 == 0 for dim in shape) else size // max(shape) * (max(shape) + 1)


def of_states(build):
    """A recurrence begins with a state of zeros that every rank has whole, and is its product.

    So of the first of all steps in time each layer gathers a rank's share of that product.
    """
    return 4 * 8 * (4 * 8 + 4 * 4) // 2 if build is lstm else 0


@pytest.mark.parametrize("build", MODELS)
def test_weights_move_and_activations_do_not(build, one_device, two_ranks):
    name = build.__name__
    shapes = [tuple(each.shape) for each in compiled(build).trainable_variables]
    padded = list(map(padded_bytes, shapes))
    statistics = 4 if build is cnn else 0
    for values, calls, moved in (each[name] for each in two_ranks):
        assert_same(values, one_device[name], name)
        assert calls["all_reduce"] == 1 + statistics  # the loss, and batch statistics
        assert calls["reduce_scatter"] == len(shapes)
        assert moved["reduce_scatter"] == sum(padded)
        assert len(shapes) <= calls["all_gather"] <= 2 * len(shapes)
        assert sum(padded) // 2 <= moved["all_gather"] <= sum(padded) + of_states(build)
