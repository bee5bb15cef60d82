"""The states of the callbacks of a fit that are saved with it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from keras import callbacks
from keras.callbacks import Callback

from shardcore.domain.errors import CheckpointError

# The attributes of Keras' callbacks that change while a fit runs.
_ATTRIBUTES: tuple[tuple[type[Callback], tuple[str, ...]], ...] = (
    (callbacks.EarlyStopping, ("wait", "stopped_epoch", "best", "best_epoch", "best_weights")),
    (callbacks.ReduceLROnPlateau, ("wait", "best", "cooldown_counter")),
    (callbacks.ModelCheckpoint, ("best",)),
)


def states_of(
    callbacks: Iterable[Callback],
) -> tuple[dict[str, dict[str, Any]], dict[str, torch.Tensor]]:
    """Returns the states of callbacks as JSON, and the arrays in them by name.

    Callbacks of Keras have known attributes. Others give their state by `state_dict()`, if they
    have it.
    """
    states: dict[str, dict[str, Any]] = {}
    arrays: dict[str, torch.Tensor] = {}
    for name, callback in _named(callbacks):
        states[name] = {
            key: _to_json(f"{name}/{key}", value, arrays) for key, value in _state(callback).items()
        }
    return states, arrays


def restore(
    callbacks: Iterable[Callback],
    states: Mapping[str, Mapping[str, object]],
    arrays: Mapping[str, torch.Tensor],
) -> None:
    """Gives callbacks the states that `states_of` has returned of the same ones."""
    for name, callback in _named(callbacks):
        if name not in states:
            continue
        state = {
            key: _from_json(f"{name}/{key}", value, arrays) for key, value in states[name].items()
        }
        if _attributes(callback):
            vars(callback).update(state)
        else:
            callback.load_state_dict(state)


def _named(callbacks: Iterable[Callback]) -> Iterator[tuple[str, Callback]]:
    """Yields the callbacks that have a state, with their class and their number in it."""
    counts: dict[str, int] = {}
    for callback in callbacks:
        if _attributes(callback) or hasattr(callback, "load_state_dict"):
            kind = type(callback).__name__
            counts[kind] = counts.get(kind, -1) + 1
            yield f"callbacks/{kind}/{counts[kind]}", callback


def _attributes(callback: Callback) -> tuple[str, ...]:
    return next((names for kind, names in _ATTRIBUTES if isinstance(callback, kind)), ())


def _state(callback: Callback) -> dict[str, Any]:
    names = _attributes(callback)
    if not names:
        return dict(callback.state_dict())
    return {name: vars(callback)[name] for name in names if name in vars(callback)}


def _to_json(name: str, value: Any, arrays: dict[str, torch.Tensor]) -> Any:
    """Returns `value` as JSON. Arrays, alone or in a list, are put into `arrays`."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        arrays[name] = torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape)
        return {"array": name}
    if isinstance(value, list | tuple):
        return [_to_json(f"{name}/{number}", inner, arrays) for number, inner in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str | dict):
        return value
    raise CheckpointError(
        f"{name} is {type(value).__name__}, which no checkpoint can save: give numbers, texts and "
        "NumPy arrays in state_dict()."
    )


def _from_json(name: str, value: object, arrays: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_from_json(f"{name}/{number}", inner, arrays) for number, inner in enumerate(value)]
    if isinstance(value, dict) and value.keys() == {"array"}:
        return arrays[value["array"]].numpy()
    return value
