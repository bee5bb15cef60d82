"""Every public class of `keras.optimizers`, with every shared option, and every schedule."""

from collections.abc import Callable
from typing import Any

import keras

from tests.matrix.cases.classifier import (
    CLASSES,
    FEATURES,
    REAL,
    L,
    Make,
    adam,
    classifier,
    real_targets,
    reals,
    trained,
)
from tests.matrix.parity import Case

O = keras.optimizers  # noqa: E741
# The step sizes are such that three steps change the weights by about as much as they are.
OPTIMIZER_OPTIONS: dict[str, dict[str, Any]] = {
    "Adadelta": {"learning_rate": 1.0, "epsilon": 1e-3},
    "Adafactor": {"learning_rate": 0.05},
    "Adagrad": {"learning_rate": 0.05},
    "Adam": {"learning_rate": 0.01, "epsilon": 1e-3},
    "AdamW": {"learning_rate": 0.01, "epsilon": 1e-3},
    "Adamax": {"learning_rate": 0.01, "epsilon": 1e-3},
    "Ftrl": {"learning_rate": 0.05, "l1_regularization_strength": 0.01},
    "Lamb": {"learning_rate": 0.01, "epsilon": 1e-3},
    "Lion": {"learning_rate": 0.01},
    "Muon": {"learning_rate": 0.01, "epsilon": 1e-3},
    "Nadam": {"learning_rate": 0.01, "epsilon": 1e-3},
    "RMSprop": {"learning_rate": 0.01, "epsilon": 1e-3},
    "SGD": {"learning_rate": 0.1},
    "ScheduleFreeAdamW": {"learning_rate": 0.01, "epsilon": 1e-3},
}
SHARED_OPTIONS: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.02},
    "weight_decay": {"weight_decay": 0.1},
    "ema": {"use_ema": True, "ema_momentum": 0.5},
    "ema overwrite": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "loss scale": {"loss_scale_factor": 8.0},
    "all": {"global_clipnorm": 0.2, "weight_decay": 0.1, "use_ema": True,
            "ema_overwrite_frequency": 2, "gradient_accumulation_steps": 2},
}  # fmt: skip
OWN_OPTIONS: dict[str, Make] = {
    "Adam/amsgrad": lambda: O.Adam(0.01, epsilon=1e-3, amsgrad=True),
    "Adafactor/absolute": lambda: O.Adafactor(0.05, relative_step=False),
    "Ftrl/shrinkage": lambda: O.Ftrl(0.05, l2_regularization_strength=0.1, beta=0.1,
                                     l2_shrinkage_regularization_strength=0.1),
    "Muon/plain": lambda: O.Muon(0.01, nesterov=False, exclude_layers=["dense_1"]),
    "RMSprop/centered": lambda: O.RMSprop(0.01, momentum=0.5, epsilon=1e-3, centered=True),
    "SGD/momentum": lambda: O.SGD(0.1, momentum=0.9),
    "SGD/nesterov": lambda: O.SGD(0.1, momentum=0.9, nesterov=True),
    "ScheduleFreeAdamW/warmup": lambda: O.ScheduleFreeAdamW(0.01, warmup_steps=2, epsilon=1e-3),
    "LossScaleOptimizer": lambda: O.LossScaleOptimizer(adam(), 16.0),
    "LossScaleOptimizer/growing": lambda: O.LossScaleOptimizer(O.SGD(0.1, global_clipnorm=0.1),
                                                               16.0, dynamic_growth_steps=1),
    "LossScaleOptimizer/overflowing": lambda: O.LossScaleOptimizer(adam(), 1e38),
    "Optimizer/subclass": lambda: Sign(0.01),
}  # fmt: skip


class Sign(O.Optimizer):
    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.last = [self.add_variable_from_reference(v, name="last") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        last = self.last[self._get_variable_index(variable)]
        self.assign(last, gradient)
        rate = keras.ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * keras.ops.tanh(gradient + last))


def _optimized(name: str, make: Make) -> Case:
    return trained(name, lambda: {"optimizer": make(), "loss": "mse"}, REAL)


def _optimizers() -> list[Case]:
    found = []
    for name, options in OPTIMIZER_OPTIONS.items():
        found.append(_optimized(name, lambda n=name, o=options: getattr(O, n)(**o)))
        for note, shared in SHARED_OPTIONS.items():
            if note == "all" or name in ("Adam", "SGD", "Muon"):
                both = {**options, **shared}
                found.append(
                    _optimized(f"{name}/{note}", lambda n=name, o=both: getattr(O, n)(**o))
                )
    found += [_optimized(name, make) for name, make in OWN_OPTIONS.items()]
    return [*found, _excluded(), _several(), _embedded()]


def _built(name: str, prepare: Callable[[Any], Any]) -> Case:
    """A case whose optimizer needs the built model."""

    def build() -> Any:
        model = classifier(None)
        model.compile(prepare(model), "mse")
        return model

    return Case(
        name, build, lambda rng, rows: (reals(rng, rows, FEATURES), real_targets(rng, rows))
    )


def _excluded() -> Case:
    def prepare(model: Any) -> Any:
        optimizer = O.AdamW(0.01, weight_decay=0.1, epsilon=1e-3)
        optimizer.exclude_from_weight_decay([model.layers[1].kernel], ["bias"])
        return optimizer

    return _built("AdamW/excluded", prepare)


def _several() -> Case:
    def prepare(model: Any) -> Any:
        first = {v.path: O.SGD(0.1, momentum=0.5) for v in model.layers[1].trainable_variables}
        return O.MultiOptimizer(O.OptimizerMap(adam(), first))

    return _built("MultiOptimizer", prepare)


def _embedded() -> Case:
    def build() -> Any:
        x = keras.Input((3,), dtype="int32")
        h = L.Flatten()(L.Embedding(8, 4)(x))
        model = keras.Model(x, L.Dense(CLASSES)(L.Dense(8, activation="tanh")(h)))
        model.compile(O.Muon(0.01), "mse")
        return model

    return Case(
        "Muon/embedding",
        build,
        lambda rng, rows: (rng.integers(0, 8, (rows, 3)), real_targets(rng, rows)),
    )


OPTIMIZERS = _optimizers()

D = O.schedules


class Halving(D.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / (1 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {}


SCHEDULES = [
    _optimized(name, lambda make=make: O.SGD(make(), momentum=0.5))
    for name, make in {
        "CosineDecay": lambda: D.CosineDecay(0.01, 3, warmup_target=0.1, warmup_steps=2),
        "CosineDecay/plain": lambda: D.CosineDecay(0.1, 3, alpha=0.1),
        "CosineDecayRestarts": lambda: D.CosineDecayRestarts(0.1, 2),
        "ExponentialDecay": lambda: D.ExponentialDecay(0.1, 2, 0.5),
        "ExponentialDecay/staircase": lambda: D.ExponentialDecay(0.1, 2, 0.5, staircase=True),
        "InverseTimeDecay": lambda: D.InverseTimeDecay(0.1, 2, 0.5),
        "PiecewiseConstantDecay": lambda: D.PiecewiseConstantDecay([1, 2], [0.1, 0.05, 0.01]),
        "PolynomialDecay": lambda: D.PolynomialDecay(0.1, 2, power=2.0),
        "PolynomialDecay/cycle": lambda: D.PolynomialDecay(0.1, 1, cycle=True),
        "LearningRateSchedule/subclass": Halving,
    }.items()
]
