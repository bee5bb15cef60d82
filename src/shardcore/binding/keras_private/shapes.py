"""Contexts in which models are built and run on tensors that have shapes, and no values."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import torch
from keras import Variable

from shardcore.binding.keras_private.process import is_symbolic
from shardcore.binding.keras_private.rebinding import replace, wrap_calls
from shardcore.binding.keras_private.table import WITHOUT_VALUES
from shardcore.binding.types import Original
from shardcore.domain.errors import PolicyError


@contextmanager
def repeating_shapes() -> Iterator[None]:
    """Lets `keras.ops.repeat` infer shapes on the meta device.

    In Keras 3.15 it passes a symbolic tensor to itself, which fails. Keras then computes with
    values of variables, and a model on the meta device has none.
    """

    def repeat(original: Original, x: Any, repeats: Any, axis: int | None = None) -> Any:
        if not is_symbolic():
            return original(x, repeats, axis=axis)
        x = keras.ops.convert_to_tensor(x)
        dtype = keras.backend.standardize_dtype(x.dtype)
        shape = keras.ops.repeat(keras.KerasTensor(x.shape, dtype), repeats, axis).shape
        return torch.empty(shape, dtype=x.dtype, device=x.device)

    with _with_replacement("numpy.repeat", wrap_calls(repeat)):
        yield


@contextmanager
def drawing_without_values() -> Iterator[None]:
    """Lets random functions draw with seeds that have no values, as on the meta device."""

    def generator(original: Original, seed: object) -> None:
        return None

    with _with_replacement("random.torch_seed_generator", wrap_calls(generator)):
        yield


@contextmanager
def variables_without_memory(reader: str) -> Iterator[None]:
    """Makes each variable one zero in memory, expanded to its shape.

    Writes to it are left out. Who reads its values into NumPy gets a PolicyError about `reader`.
    """

    def initialize(original: Original, variable: Variable, initializer: object) -> None:
        if math.prod(variable.shape) <= 1:
            original(variable, initializer)
        else:
            zero = keras.ops.zeros((), variable._dtype)
            variable._initialize(zero.expand(tuple(variable.shape)))

    def assign(original: Original, variable: Variable, value: object) -> None:
        if not _is_expanded(variable):
            original(variable, value)

    def to_numpy(original: Original, x: Any) -> Any:
        if _is_expanded(x):
            raise PolicyError(
                f"{reader} was called to see the model's shapes only, and reads values of a "
                f"variable of shape {tuple(x.shape)}, which has none there: load weights and the "
                "like outside it, or give the built model itself, and name the model and its "
                f"layers: shardcore.plan({reader}, mesh)."
            )
        return original(x)

    with (
        _with_replacement("Variable._initialize_with_initializer", wrap_calls(initialize)),
        _with_replacement("Variable._direct_assign", wrap_calls(assign)),
        _with_replacement("core.convert_to_numpy", wrap_calls(to_numpy)),
    ):
        yield


def _is_expanded(x: Any) -> bool:
    """Returns whether a variable, or its parameter, is one element in memory that is expanded."""
    value = x._value if isinstance(x, Variable) else x
    is_parameter = isinstance(value, torch.nn.Parameter)
    return is_parameter and value.numel() > 1 and not any(value.stride())


@contextmanager
def _with_replacement(key: str, make: Callable[[Any], object]) -> Iterator[None]:
    with ExitStack() as undo:
        replace(WITHOUT_VALUES[key], make, undo)
        yield
