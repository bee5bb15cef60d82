"""`LossScaleOptimizer`: steps decide on the device what plain Keras decides on the host."""

from itertools import pairwise
from unittest.mock import patch

import keras
import numpy as np
import pytest
import torch

from shardcore.binding import keras_private
from shardcore.testing import run_ranks
from tests.distributed.precision.half_precision import (
    CAPTURED,
    HAS_NAN,
    INNER,
    OVERFLOWS,
    STEPS,
    batch,
    compiled,
    distribute,
    forget_last_feature,
    said_of,
    state,
    train,
)
from tests.distributed.programs import assert_close, needs_compiler

# A sum over ranks is rounded to float16, as a gradient is.
ROUNDING = 1e-3


@pytest.fixture(scope="module")
def keras_alone():
    (found,) = run_ranks(train, 1, None, None, timeout=60)
    for states, *_ in found.values():
        scales = [_scale(each) for each in states]
        assert {after / before for before, after in pairwise(scales)} == {0.5, 1.0, 2.0}
    return found


def _scale(values):
    return next(float(each) for name, each in values.items() if name.endswith("dynamic_scale"))


def assert_equal(found, reference, atol):
    """Weights, slots, accumulators, averages and counters after each step, skipped ones too."""
    assert found.keys() == reference.keys()
    for name, (states, *_) in found.items():
        for step, (values, expected) in enumerate(zip(states, reference[name][0], strict=True)):
            for path, value in values.items():
                of_counter = path.endswith(("steps", "dynamic_scale", "counter", "iteration"))
                np.testing.assert_allclose(
                    *(value, expected[path]),
                    **{"rtol": 0, "atol": 0 if of_counter else atol},
                    err_msg=f"{name}, step {step}: {path}",
                )


@pytest.mark.parametrize("jit", [False, "auto"])
def test_one_device_has_the_numbers_of_keras_and_reads_none(keras_alone, jit):
    (found,) = run_ranks(train, 1, "single", None, INNER, jit, timeout=60)
    assert_equal(found, keras_alone, atol=1e-7)
    for _, reads, runs in found.values():
        assert runs == (CAPTURED if jit else STEPS)  # one program
        assert sum(reads[CAPTURED:]) == 0


@pytest.mark.parametrize(("strategy", "shape"), [("dtensor", (2, 1)), ("manual", (1, 2))])
def test_ranks_skip_the_steps_that_one_device_skips(keras_alone, strategy, shape):
    """A gradient overflows in the shard of one rank."""
    ranks = run_ranks(train, 2, strategy, shape, timeout=100)
    for found in ranks:
        assert_equal(found, keras_alone, ROUNDING)
        for _, reads, runs in found.values():
            assert runs == CAPTURED
            assert sum(reads[CAPTURED:]) == 0
    assert_equal(ranks[0], ranks[1], atol=0)


def loss_of_finite(target, output):
    """A mean squared error; zero if an output of any rank is not finite."""
    is_finite = keras.ops.all(keras.ops.isfinite(output))
    return keras.losses.mean_squared_error(target, output) * keras.ops.cast(is_finite, "float32")


def compiled_steps(_rank, jit):
    distribute("dtensor", (2, 1))
    keras.config.set_dtype_policy("mixed_float16")
    kernel = keras.layers.Dense(4, use_bias=False, kernel_initializer="ones", name="first")
    model = keras.Sequential([keras.Input((8,)), kernel])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3), 2.0**10, 3)
    model.compile(optimizer, loss_of_finite, jit_compile=jit)
    for step in range(OVERFLOWS[-1] + 1, STEPS):
        model.train_on_batch(*batch(step))
    return state(model)


@needs_compiler
def test_a_compiled_step_skips_the_same_steps():
    """Inductor rounds no gradient to float16 in between, so the skipped ones have a nan.

    It computes wrong minimums of `uint8`, so `all` over ranks is a maximum.
    """
    eager, _ = run_ranks(compiled_steps, 2, False)
    assert eager["steps"] == STEPS - OVERFLOWS[-1] - 1 - len(HAS_NAN)
    for found in run_ranks(compiled_steps, 2, True, timeout=200):
        assert_close([found], eager, atol=1e-5)


class Counts(keras.optimizers.SGD):
    """An optimizer of a user that counts its updates in Python."""

    updates = 0

    def update_step(self, gradient, variable, learning_rate):
        Counts.updates += 1
        super().update_step(gradient, variable, learning_rate)


def updates_of_user(_rank):
    distribute("single", None)
    model = compiled(Counts(1e-2), jit=False)
    said = said_of("training")
    forget_last_feature(model)
    for step in range(3):
        model.train_on_batch(*batch(step))
    return Counts.updates, state(model)["steps"], said


def test_python_of_a_user_runs_in_no_skipped_step():
    ((updates, steps, said),) = run_ranks(updates_of_user, 1)
    assert (updates, steps) == (2 * 4, 2)  # of four variables; the first step was skipped
    assert len([each for each in said if "decided on the host" in each]) == 1


def warnings_of(_rank, policy, capability):
    """Returns what three models warn of, if a GPU has this compute capability."""
    distribute("single", None)
    keras.config.set_dtype_policy(policy)
    said = said_of("training")
    with (
        patch.object(keras_private, "torch_device", lambda: "cuda:0"),
        patch.object(torch.cuda, "get_device_capability", lambda: capability),
        patch.object(torch.cuda, "get_device_name", lambda: "Tesla T4"),
    ):
        for _ in range(3):
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
            model.make_train_function()
    return said


def test_bfloat16_on_a_gpu_that_emulates_it_is_warned_of_once():
    ((warning,),) = run_ranks(warnings_of, 1, "mixed_bfloat16", (7, 5))
    assert "'mixed_float16'" in warning
    assert "Tesla T4 (compute capability 7.5)" in warning
    assert run_ranks(warnings_of, 1, "mixed_bfloat16", (8, 0)) == [[]]
    assert run_ranks(warnings_of, 1, "mixed_float16", (7, 5)) == [[]]
