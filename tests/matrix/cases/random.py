"""Every public function of `keras.random`, drawn inside a model: the values of one device."""

from collections.abc import Callable
from typing import Any

import keras

from tests.matrix.cases.classifier import CLASSES, FEATURES, L, adam, labels, reals
from tests.matrix.parity import Case

R, ops = keras.random, keras.ops
Draw = Callable[[Any, Any], Any]  # of activations and a seed


class Noisy(L.Layer):
    """Adds what is drawn to its input."""

    def __init__(self, draw: Draw, seed: Any = None) -> None:
        super().__init__()
        self.draw = draw
        self.seed_generator = R.SeedGenerator(seed)

    def call(self, x):
        return x + 0.1 * ops.cast(self.draw(x, self.seed_generator), x.dtype)


def _odds(x: Any) -> Any:
    return ops.sigmoid(ops.stop_gradient(x))


def _categories(x: Any, seed: Any) -> Any:
    return R.categorical(ops.stop_gradient(x), x.shape[-1], seed=seed)


# Of shapes that ranks divide, and do not: the batch is sharded, or whole.
DRAWS: dict[str, Draw] = {
    "beta": lambda x, seed: R.beta(ops.shape(x), 2.0, 3.0, seed=seed),
    "beta/of tensors": lambda x, seed: R.beta(ops.shape(x), 1 + _odds(x), 2 + _odds(x), seed=seed),
    "binomial": lambda x, seed: R.binomial(ops.shape(x), 5.0, 0.4, seed=seed),
    "binomial/of tensors": lambda x, seed: R.binomial(ops.shape(x), 5.0, _odds(x), seed=seed),
    "categorical": _categories,
    "dropout": lambda x, seed: R.dropout(x, 0.4, seed=seed),
    "dropout/noise shape": lambda x, seed: R.dropout(x, 0.4, (1, x.shape[-1]), seed=seed),
    "gamma": lambda x, seed: R.gamma(ops.shape(x), 2.0, seed=seed),
    "gamma/of tensors": lambda x, seed: R.gamma(ops.shape(x), 1 + _odds(x), seed=seed),
    "normal": lambda x, seed: R.normal(ops.shape(x), seed=seed),
    "normal/kernel": lambda x, seed: x @ R.normal((x.shape[-1], x.shape[-1]), seed=seed),
    "normal/rows": lambda x, seed: R.normal((x.shape[0], 1), seed=seed),
    "randint": lambda x, seed: R.randint(ops.shape(x), 0, 9, seed=seed),
    "shuffle": lambda x, seed: R.shuffle(x, seed=seed),
    "shuffle/columns": lambda x, seed: R.shuffle(x, axis=1, seed=seed),
    "truncated_normal": lambda x, seed: R.truncated_normal(ops.shape(x), seed=seed),
    "uniform": lambda x, seed: R.uniform(ops.shape(x), seed=seed),
    "uniform/one row": lambda x, seed: R.uniform((1, x.shape[-1]), -1.0, 1.0, seed=seed),
    "uniform/fixed": lambda x, _: R.uniform(ops.shape(x), seed=3),
    "uniform/global seed": lambda x, _: R.uniform(ops.shape(x)),
    "SeedGenerator": lambda x, seed: ops.mean(ops.cast(seed.next() % 7, "float32")),
}


def _drawing(name: str, draw: Draw) -> Case:
    def build() -> Any:
        x = keras.Input((FEATURES,))
        h = Noisy(draw)(L.Dense(8, activation="tanh")(x))
        model = keras.Model(x, L.Dense(CLASSES)(Noisy(draw, seed=5)(h)))
        model.compile(adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return Case(name, build, lambda rng, rows: (reals(rng, rows, FEATURES), labels(rng, rows)))


RANDOM = [_drawing(name, draw) for name, draw in DRAWS.items()]
