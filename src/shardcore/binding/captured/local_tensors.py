"""This rank's plain parts of tensors, in which a step hands them in and out."""

from collections.abc import Sequence
from typing import Any

import keras
import torch

from shardcore.binding import keras_private
from shardcore.binding.context.session import Session

# The layout of a tensor, None of a plain one, and its global shape; None of what is no tensor.
Form = tuple[Any, tuple[int, ...]] | None


def full(value: Any, session: Session | None) -> Any:
    """Returns the full value of a tensor; what is no tensor as it is."""
    if session is None or not isinstance(value, torch.Tensor):
        return value
    return session.strategy.full_tensor(value)


def reduced(value: Any, session: Session | None) -> torch.Tensor:
    """Returns a value as a tensor that is no partial sum."""
    tensor: torch.Tensor = keras.ops.convert_to_tensor(value)
    if session is None or not session.strategy.owns(tensor):
        return tensor
    return session.strategy.activation(tensor, None)


def apart(values: Sequence[Any], session: Session | None) -> tuple[list[Any], list[Form]]:
    """Returns this rank's part of each tensor, with its form; what is no tensor as it is."""
    forms = [_form(each, session) for each in values]
    if session is None:
        return list(values), forms
    local = session.strategy.local
    return [
        each if form is None else local(each) for each, form in zip(values, forms, strict=True)
    ], forms


def joined(parts: Sequence[Any], forms: Sequence[Form], session: Session | None) -> list[Any]:
    """Returns the values that were taken `apart`."""
    return [_joined(*each, session) for each in zip(parts, forms, strict=True)]


def local_tensors(data: Any, session: Session | None) -> list[Any]:
    """Returns this rank's plain tensors of a batch, in order."""
    tensors = [leaf for leaf in keras_private.leaves(data) if isinstance(leaf, torch.Tensor)]
    if session is None:
        return tensors
    with torch.no_grad():
        return [session.strategy.local(each) for each in tensors]


def _form(value: Any, session: Session | None) -> Form:
    if not isinstance(value, torch.Tensor):
        return None
    return None if session is None else session.strategy.layout(value), tuple(value.shape)


def _joined(part: Any, form: Form, session: Session | None) -> Any:
    if session is None or form is None or form[0] is None:
        return part
    layout, shape = form
    return session.join(part, layout, shape)
