"""Sixty ordinary programs stay captured: what a step may read is not refused for caution alone.

They were written before the rule of what a step may read, and stay as they are. A program that is
not captured is in `REFUSED`, with its reason.
"""

import logging
import warnings

import keras
import numpy as np

from shardcore.testing import run_ranks
from tests.distributed.capture.idioms import configs, functions, layers, learning, tables
from tests.distributed.capture.steps import begin, layer_calls, messages

IDIOMS = {
    builder.__name__: builder
    for module in (configs, tables, layers, functions, learning)
    for builder in module.IDIOMS
}
FEWEST_CAPTURED = 57
# The idioms that are not captured, each with a part of the message that says why.
REFUSED: dict[str, str] = {}
# Over ranks the same code makes and checks guards, so some are tested there.
ON_RANKS = (
    *("frozen_dataclass", "chain_of_maps", "numpy_table_of_a_module", "getattr_with_a_default"),
    *("linear_of_torch", "lru_cached_helper", "logging_calls", "own_metric_class"),
    *("own_train_step", "functional_backbone_with_lambda"),
)
# The steps of an epoch but its last form one program, the last ones another.
EPOCHS, ROWS, BATCH = 3, 12, 4


def compiled(builder):
    """A model of what the builder makes: a layer, or a model that is compiled already."""
    keras.utils.set_random_seed(11)
    made = builder()
    if isinstance(made, keras.Model):
        return made
    inputs = keras.Input((6,))
    hidden = made(keras.layers.Dense(6, name="first")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, name="last")(hidden))
    model.compile("adam", "mse")
    return model


def data():
    rng = np.random.default_rng(5)
    return [rng.normal(size=(ROWS, columns)).astype("float32") for columns in (6, 1)]


def trained(builder, run_eagerly):
    """The losses of `fit`, and whether its last steps ran without Keras' layers."""
    model, (x, y) = compiled(builder), data()
    model.run_eagerly = run_eagerly
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, epochs=EPOCHS, **options).history
    with layer_calls() as called:
        history["again"] = model.fit(x, y, **options).history["loss"]
    weights = [keras.ops.convert_to_numpy(weight) for weight in model.weights]
    return history, weights, not called


def outcomes(_rank, shape, names):
    """Finds what each idiom computes, eagerly and not; if it is captured; and what was said."""
    begin(shape)
    said = messages()
    logging.getLogger("shardcore").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        eager, eager_weights, _ = trained(IDIOMS[name], run_eagerly=True)
        said.clear()
        history, weights, is_captured = trained(IDIOMS[name], run_eagerly=False)
        found[name] = (eager, eager_weights), (history, weights), is_captured, list(said)
    return found


def assert_close(found, expected, name):
    """The losses and weights are those of eager steps; `name` is that of the idiom."""
    (history, weights), (eager, eager_weights) = found, expected
    assert history.keys() == eager.keys()
    for key, values in eager.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5, atol=1e-6, err_msg=name)
    for weight, other in zip(weights, eager_weights, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6, err_msg=name)


def refusals(found):
    """The idioms that are not captured, with what was said."""
    return {
        name: " ".join(said) or "nothing was said"
        for name, (_, _, is_captured, said) in found.items()
        if not is_captured
    }


def test_there_are_sixty_idioms():
    assert len(IDIOMS) == 60


def check(found):
    """Every idiom computes as eagerly; those that are not captured are in `REFUSED`."""
    for name, (expected, computed, _, _) in found.items():
        assert_close(computed, expected, name)
    refused = refusals(found)
    print("\n".join(f"{name}: {reason}" for name, reason in refused.items()))
    unexpected = {
        name: reason
        for name, reason in refused.items()
        if name not in REFUSED or REFUSED[name] not in reason
    }
    assert unexpected == {}, f"{len(found) - len(refused)} of {len(found)} are captured"
    captured = found.keys() - refused.keys()
    assert captured & REFUSED.keys() == set(), "REFUSED names idioms that are captured"
    return captured


def test_ordinary_programs_are_captured():
    (found,) = run_ranks(outcomes, 1, None, tuple(IDIOMS), timeout=240)
    assert len(check(found)) >= FEWEST_CAPTURED


def test_ordinary_programs_are_captured_on_two_ranks():
    first, second = run_ranks(outcomes, 2, (2, 1), ON_RANKS, timeout=120)
    assert check(first) == check(second)
