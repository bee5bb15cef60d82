"""Contexts in which models are built and run on tensors that have shapes, and no values."""

import math
from contextlib import AbstractContextManager
from typing import Any

import attrs
import keras
import torch
from keras import Variable

from shardcore.binding.keras_private.patches import replaced, replaces
from shardcore.binding.keras_private.process import is_symbolic
from shardcore.binding.types import Original
from shardcore.domain.errors import PolicyError


def repeating_shapes() -> AbstractContextManager[None]:
    """Lets `keras.ops.repeat` infer shapes on the meta device.

    In Keras 3.15 it passes a symbolic tensor to itself, which fails. Keras then computes with
    values of variables, and a model on the meta device has none.
    """
    return replaced(repeat)


@replaces(
    "keras.src.backend.torch.numpy:repeat",
    reason="Gives itself a symbolic tensor on the meta device, which it cannot convert.",
    everywhere=True,
)
def repeat(original: Original, x: Any, repeats: Any, axis: int | None = None) -> Any:
    """Replaces `repeat` where Keras infers shapes."""
    if not is_symbolic():
        return original(x, repeats, axis=axis)
    x = keras.ops.convert_to_tensor(x)
    dtype = keras.backend.standardize_dtype(x.dtype)
    shape = keras.ops.repeat(keras.KerasTensor(x.shape, dtype), repeats, axis).shape
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def drawing_without_values() -> AbstractContextManager[None]:
    """Lets random functions draw with seeds that have no values, as on the meta device."""
    return replaced(no_generator)


@replaces(
    "keras.src.backend.torch.random:torch_seed_generator",
    reason="Reads the values of a seed.",
    everywhere=True,
)
def no_generator(_original: Original, seed: object) -> None:
    """Replaces `torch_seed_generator`: torch's own generator draws."""


def variables_without_memory(reader: str) -> AbstractContextManager[None]:
    """Makes each variable one zero in memory, expanded to its shape.

    Writes to it are left out. Who reads its values into NumPy gets a PolicyError about `reader`.
    """
    return replaced(initialize, assign, _Reads(reader).to_numpy)


@replaces(
    "keras.src.backend.common.variables:Variable._initialize_with_initializer",
    reason="Makes a value, for which memory may be too small.",
)
def initialize(original: Original, variable: Variable, initializer: object) -> None:
    """Replaces `Variable._initialize_with_initializer`: makes one zero."""
    if math.prod(variable.shape) <= 1:
        original(variable, initializer)
    else:
        zero = keras.ops.zeros((), variable._dtype)
        variable._initialize(zero.expand(tuple(variable.shape)))


@replaces(
    "keras.src.backend.torch.core:Variable._direct_assign",
    reason="Writes into a value that is not there.",
)
def assign(original: Original, variable: Variable, value: object) -> None:
    """Replaces `Variable._direct_assign`."""
    if not _is_expanded(variable):
        original(variable, value)


@attrs.frozen
class _Reads:
    """Refuses that `reader` reads values."""

    reader: str

    @replaces(
        "keras.src.backend.torch.core:convert_to_numpy",
        reason="Reads a value that is not there.",
        everywhere=True,
    )
    def to_numpy(self, original: Original, x: Any) -> Any:
        if _is_expanded(x):
            raise PolicyError(
                f"{self.reader} was called to see the model's shapes only, and reads values of a "
                f"variable of shape {tuple(x.shape)}, which has none there: load weights and the "
                "like outside it, or give the built model itself, and name the model and its "
                f"layers: shardcore.plan({self.reader}, mesh)."
            )
        return original(x)


def _is_expanded(x: Any) -> bool:
    """Recognizes by its strides a variable, or its parameter, that is one zero in memory."""
    value = x._value if isinstance(x, Variable) else x
    is_parameter = isinstance(value, torch.nn.Parameter)
    return is_parameter and value.numel() > 1 and not any(value.stride())
