"""Contexts in which models are built and run on tensors that have shapes, and no values."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import torch

from shardcore.binding.keras_private.process import is_symbolic
from shardcore.binding.keras_private.rebinding import around, replace
from shardcore.binding.keras_private.table import WITHOUT_VALUES
from shardcore.binding.types import Original


@contextmanager
def repeating_shapes() -> Iterator[None]:
    """Lets `keras.ops.repeat` infer shapes on the meta device.

    That of Keras 3.15 gives itself a symbolic tensor, which it cannot convert. Keras then computes
    with the values of the variables, which a model that is built on the meta device has not.
    """

    def repeat(original: Original, x: Any, repeats: Any, axis: int | None = None) -> Any:
        if not is_symbolic():
            return original(x, repeats, axis=axis)
        x = keras.ops.convert_to_tensor(x)
        dtype = keras.backend.standardize_dtype(x.dtype)
        shape = keras.ops.repeat(keras.KerasTensor(x.shape, dtype), repeats, axis).shape
        return torch.empty(shape, dtype=x.dtype, device=x.device)

    with _replaced("numpy.repeat", around(repeat)):
        yield


@contextmanager
def drawing_without_values() -> Iterator[None]:
    """Lets random functions draw with seeds that have no values, as on the meta device."""

    def generator(original: Original, seed: Any) -> None:
        return None

    with _replaced("random.torch_seed_generator", around(generator)):
        yield


@contextmanager
def _replaced(key: str, make: Callable[[Any], Any]) -> Iterator[None]:
    with ExitStack() as undo:
        replace(WITHOUT_VALUES[key], make, undo)
        yield
