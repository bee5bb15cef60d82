"""Mixed precision: a step is skipped on all ranks where one device skips it."""

import keras
import numpy as np

from shardcore.testing import run_ranks
from tests.distributed.programs import IS_ON_GPU, assert_close, distribute

RULES = {"first/kernel": (None, "model")}
RNG = np.random.default_rng(0)


def scale_of(optimizer):
    kept = (optimizer.dynamic_scale, optimizer.step_counter, optimizer.inner_optimizer.iterations)
    return [float(value) for value in kept]


def overflows(rank, mesh):
    """A row adds half its value, times the scale, to the gradient, which ends at 65504.

    The third step overflows in the sum of two rows, and in neither of them: on a CPU, where Keras
    multiplies in float32. On a GPU products are in float16, and their sum over ranks in float32,
    which does not overflow: there a row overflows.
    """
    keras.config.set_dtype_policy("mixed_float16")
    if mesh:
        distribute(mesh, RULES)
    kernel = keras.layers.Dense(4, use_bias=False, name="first", kernel_initializer="ones")
    model = keras.Sequential([keras.Input((2,)), kernel])
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1e-3, momentum=0.9), dynamic_growth_steps=2
    )
    model.compile(
        optimizer, lambda y, outputs: 4 * keras.ops.mean(outputs, axis=-1), jit_compile=False
    )
    states = []
    for value in (1.0, 1.9, 2.1 if IS_ON_GPU else 1.5, 0.9, 0.9, 0.9, 3.9):
        rows = np.full((2, 2), value, "float32")
        model.train_on_batch(rows, np.zeros((2, 4)))
        states.append(scale_of(optimizer))
    return {
        "states": states,
        "kernel": kernel.kernel.numpy(),
        "slots": optimizer.inner_optimizer.momentums[0].numpy(),
    }


def test_steps_are_skipped_where_one_device_skips_them():
    (reference,) = run_ranks(overflows, 1, None)
    scales = {scale for scale, *_ in reference["states"]}
    steps = [applied for *_, applied in reference["states"]]
    assert len(scales) > 1  # it grew and shrank
    assert len(set(steps)) < len(steps)  # and some were skipped
    for mesh in [(2, 1), (1, 2)]:
        assert_close(run_ranks(overflows, 2, mesh), reference, atol=1e-4)


X = RNG.normal(size=(14, 12)).astype("float32")
Y = RNG.normal(size=(14, 4)).astype("float32")


def train(rank, mesh):
    if mesh:
        distribute(mesh, RULES)
    values = {}
    for policy in ("mixed_bfloat16", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        keras.utils.set_random_seed(1)
        x = keras.Input((12,))
        h = keras.layers.Dense(16, "tanh", name="first")(x)
        h = keras.layers.LayerNormalization()(keras.layers.Dropout(0.2)(h))
        model = keras.Model(x, keras.layers.Dense(4, dtype="float32")(h))
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", jit_compile=False)
        values[f"{policy} loss"] = model.fit(X, Y, 8, epochs=2, verbose=0).history["loss"]
        values[f"{policy} outputs"] = model.predict(X, verbose=0)
        values |= {f"{policy} {v.path}": v.numpy() for v in model.trainable_variables}
        if policy == "mixed_float16":
            values["scale"] = scale_of(model.optimizer)
    return values


def test_half_precision_trains_to_its_own_rounding():
    (reference,) = run_ranks(train, 1, None)
    results = run_ranks(train, 2, (1, 2))
    assert_close(results, reference, atol=2e-2)
    for name, value in results[0].items():
        np.testing.assert_array_equal(results[1][name], value)
