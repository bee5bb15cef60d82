"""Every public regularizer, constraint and initializer: of dense and convolution kernels."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tests.matrix.cases.classifier import (
    CLASSES,
    FEATURES,
    L,
    adam,
    classifier,
    real_targets,
    reals,
)
from tests.matrix.parity import Case


def _with_options(name: str, options: Callable[[], dict[str, Any]], bias: bool = True) -> Case:
    def build() -> Any:
        own = options()
        x = keras.Input((5, 5, 4))
        h = L.Conv2D(6, 2, activation="tanh", **own)(x)
        if bias:
            own |= {k.replace("kernel", "bias"): v for k, v in options().items()}
        h = L.Dense(8, activation="tanh", **own)(L.GlobalAveragePooling2D()(h))
        model = keras.Model(x, L.Dense(CLASSES)(h))
        model.compile(adam(), "mse")
        return model

    return Case(name, build, lambda rng, rows: (reals(rng, rows, 5, 5, 4), real_targets(rng, rows)))


R, C, I = keras.regularizers, keras.constraints, keras.initializers  # noqa: E741


class Third(R.Regularizer):
    def __call__(self, x):
        return keras.ops.sum(keras.ops.abs(x) ** 3)


class Shrunk(C.Constraint):
    def __call__(self, w):
        return w / keras.ops.maximum(1.0, keras.ops.max(keras.ops.abs(w)) * 2)


class Ramp(I.Initializer):
    def __call__(self, shape, dtype=None):
        count = int(np.prod(shape))
        return keras.ops.reshape(keras.ops.linspace(-0.1, 0.1, count, dtype=dtype), shape)


REGULARIZERS = [
    _with_options(name, lambda make=make: {"kernel_regularizer": make()})
    for name, make in {
        "L1": lambda: R.L1(0.1),
        "L2": lambda: R.L2(0.1),
        "L1L2": lambda: R.L1L2(0.1, 0.1),
        "Regularizer/subclass": Third,
    }.items()
]


def _orthogonal(mode: str) -> Case:
    def build() -> Any:
        model = classifier(None, kernel_regularizer=R.OrthogonalRegularizer(0.1, mode))
        model.compile(adam(), "mse")
        return model

    return Case(
        f"OrthogonalRegularizer/{mode}",
        build,
        lambda rng, rows: (reals(rng, rows, FEATURES), real_targets(rng, rows)),
    )


REGULARIZERS += [_orthogonal("rows"), _orthogonal("columns")]

CONSTRAINTS = [
    _with_options(name, lambda make=make: {"kernel_constraint": make()})
    for name, make in {
        "MaxNorm": lambda: C.MaxNorm(0.3),
        "MaxNorm/axes": lambda: C.MaxNorm(0.3, axis=None),
        "MinMaxNorm": lambda: C.MinMaxNorm(0.2, 0.4, rate=0.5),
        "NonNeg": C.NonNeg,
        "UnitNorm": C.UnitNorm,
        "UnitNorm/last": lambda: C.UnitNorm(axis=-1),
        "Constraint/subclass": Shrunk,
    }.items()
]

INITIALIZERS = [
    _with_options(name, lambda make=make: {"kernel_initializer": make()}, bias)
    for name, make, bias in [
        ("Constant", lambda: I.Constant(0.1), True),
        ("GlorotNormal", I.GlorotNormal, False),
        ("GlorotUniform", lambda: I.GlorotUniform(3), False),
        ("HeNormal", I.HeNormal, False),
        ("HeUniform", I.HeUniform, False),
        ("LecunNormal", I.LecunNormal, False),
        ("LecunUniform", I.LecunUniform, False),
        ("Ones", I.Ones, True),
        ("Orthogonal", I.Orthogonal, False),
        ("RandomNormal", I.RandomNormal, True),
        ("RandomUniform", I.RandomUniform, True),
        ("TruncatedNormal", I.TruncatedNormal, True),
        ("VarianceScaling", lambda: I.VarianceScaling(2.0, "fan_avg", "truncated_normal"), False),
        ("Zeros", I.Zeros, True),
        ("Initializer/subclass", Ramp, True),
    ]
]


def _identity() -> Case:
    def build() -> Any:
        model = classifier(None, kernel_initializer=I.Identity(0.5))
        model.compile(adam(), "mse")
        return model

    return Case(
        "Identity",
        build,
        lambda rng, rows: (reals(rng, rows, FEATURES), real_targets(rng, rows)),
    )


def _stft() -> Case:
    def build() -> Any:
        x = keras.Input((32, 1))
        h = L.Conv1D(9, 16, strides=8, kernel_initializer=I.STFT("real", None))(x)
        model = keras.Model(x, L.Dense(CLASSES)(L.GlobalAveragePooling1D()(h)))
        model.compile(adam(), "mse")
        return model

    return Case("STFT", build, lambda rng, rows: (reals(rng, rows, 32, 1), real_targets(rng, rows)))


INITIALIZERS += [_identity(), _stft()]
