"""Training cases: a model, its batches, its first values, the rules of its Megatron layout."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import frozen

MEGATRON = {
    ".*/(query|key|value)/kernel": (None, "model", None),
    ".*/(query|key|value)/bias": ("model", None),
    ".*/attention_output/kernel": ("model", None, None),
    ".*/(expand|up)/kernel": (None, "model"),
    ".*/(expand|up)/bias": ("model",),
    ".*/(contract|down)/kernel": ("model", None),
}

# Keras and torch add epsilon in other places and round otherwise: neither is to make a difference.
ADAM_EPSILON = 1e-10
LEARNING_RATE = 1e-4


@frozen
class Case:
    """A model and its data.

    Attributes:
        name: What it is called in the table.
        kind: The function of `models` that builds it.
        sizes: The arguments of that function.
        batch: Rows of the global batch.
        steps: Steps in one round of the measurement.
    """

    name: str
    kind: str
    sizes: dict[str, int]
    batch: int
    steps: int

    def build(self) -> Any:
        """The Keras model, with the first values of this case."""
        from benchmarks import models  # here, as the backend has been chosen by now

        model = getattr(models, self.kind)(**self.sizes)
        for variable in model.weights:
            if variable.path.endswith(("/kernel", "/embeddings")):
                variable.assign(first_value(variable.path, tuple(variable.shape)))
        return model

    def data(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels for so many steps; the same on every rank and in every backend."""
        return _DATA[self.kind](np.random.default_rng(steps), steps * self.batch, **self.sizes)


def first_value(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """The value of a kernel or table before the first step, row by row.

    It depends on the path and on the number of elements only: the kernel of attention has one dim
    more in Keras than in a module written by hand.
    """
    size = math.prod(shape)
    generator = np.random.default_rng(list(path.encode()))
    return size**-0.25 * generator.standard_normal(size, np.float32).reshape(shape)


def share(shapes: dict[str, tuple[int, ...]], layout: str, ranks: int) -> int:
    """The bytes of Adam's training of these float32 variables that theory has a rank store.

    Example:
        >>> share({"a/up/kernel": (4, 8), "a/up/scale": (2,)}, "megatron", 2)
        216
    """
    sizes = {path: 4 * math.prod(shape) for path, shape in shapes.items()}
    value_and_moments = 3
    return value_and_moments * sum(
        size // ranks if _is_sharded(path, layout) else size for path, size in sizes.items()
    )


def _is_sharded(path: str, layout: str) -> bool:
    if layout == "megatron":
        return any(re.fullmatch(rule, path) for rule in MEGATRON)
    return layout == "fully sharded"


def _vectors(random, rows, *, width, classes, **_):
    return random.standard_normal((rows, width), np.float32), _labels(random, (rows,), classes)


def _images(random, rows, *, size, classes, **_):
    shape = (rows, size, size, 3)
    return random.standard_normal(shape, np.float32), _labels(random, (rows,), classes)


def _tokens(random, rows, *, vocabulary, length, **_):
    windows = _labels(random, (rows, length + 1), vocabulary)
    return windows[:, :-1].copy(), windows[:, 1:].copy()


def _labels(random, shape, classes):
    return random.integers(0, classes, shape, np.int32)


_DATA: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "mlp": _vectors,
    "cnn": _images,
    "decoder": _tokens,
}

MLP = Case("MLP", "mlp", {"width": 512, "hidden": 2048, "blocks": 3, "classes": 10}, 256, 8)
CNN = Case("CNN", "cnn", {"size": 32, "filters": 32, "blocks": 3, "classes": 10}, 64, 4)
NEWCOMER = Case("small CNN", "cnn", {"size": 16, "filters": 16, "blocks": 2, "classes": 10}, 64, 9)
DECODER = Case(
    "decoder",
    "decoder",
    {"vocabulary": 8192, "width": 512, "blocks": 6, "heads": 8, "length": 256},
    batch=8,
    steps=1,
)
SMALL = Case(
    "small decoder",
    "decoder",
    {"vocabulary": 256, "width": 64, "blocks": 2, "heads": 4, "length": 64},
    batch=8,
    steps=10,
)


def tiny_decoder(blocks: int) -> Case:
    """A decoder whose step is nearly all host work."""
    sizes = {"vocabulary": 32, "width": 16, "blocks": blocks, "heads": 2, "length": 8}
    return Case(f"{blocks} blocks", "decoder", sizes, batch=2, steps=2)


def quick(case: Case) -> Case:
    """The same model with sizes that only show that everything runs."""
    small = {"hidden": 256, "filters": 8, "vocabulary": 256, "width": 64, "blocks": 2, "length": 32}
    sizes = {name: min(size, small.get(name, size)) for name, size in case.sizes.items()}
    return Case(case.name, case.kind, sizes, min(case.batch, 32), 2)
