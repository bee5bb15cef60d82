"""The state in a checkpoint: tensors of a model, torch's generators, callbacks of a fit."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import keras
import numpy as np
import torch
from keras.callbacks import Callback, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau

from shardcore.binding import keras_private, torch_modules
from shardcore.binding.keras_private.variables import storage_of, tensor_of
from shardcore.binding.ranks import rank_consistency
from shardcore.binding.ranks.session import Session
from shardcore.domain.checkpoints.contents import Piece, VariableToLoad, VariableToStore
from shardcore.domain.errors import CheckpointError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports.checkpoints import Content

# The name of the seed of random functions that get none.
_GLOBAL_SEED = "global_seed"
# The attributes of Keras' callbacks that change while a fit runs.
_ATTRIBUTES: tuple[tuple[type[Callback], tuple[str, ...]], ...] = (
    (EarlyStopping, ("wait", "stopped_epoch", "best", "best_epoch", "best_weights")),
    (ReduceLROnPlateau, ("wait", "best", "cooldown_counter")),
    (ModelCheckpoint, ("best",)),
)


@attrs.frozen(eq=False)
class StateTensor:
    """A tensor that is saved, and loaded in place.

    Args:
        name: Its unique name in a checkpoint.
        path: Its Keras path, for messages.
        group: What it belongs to, as in the index.
        shape: Its global shape.
        layout: Its storage layout.
        local: Its local shard, a plain tensor that shares its memory.
    """

    name: str
    path: str
    group: str
    shape: tuple[int, ...]
    layout: Layout
    local: torch.Tensor

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        return str(self.local.dtype).removeprefix("torch.")

    def to_store(self) -> VariableToStore:
        """Leaves out the values: which rank writes what follows from this alone."""
        return VariableToStore(
            self.name, self.path, self.group, self.shape, self.dtype, self.layout
        )

    def to_load(self) -> VariableToLoad:
        """Leaves out the layout: a checkpoint is loaded into any."""
        return VariableToLoad(self.name, self.path, self.group, self.shape, self.dtype)


def tensors_of(model: keras.Model, session: Session | None) -> list[StateTensor]:
    """Lists the tensors of a built model: its weights and seeds, its optimizer, its metrics.

    Each has the key that Keras gives it in weight files; a seed, and a variable of a layer that
    Keras saves in another form, has its number.
    """
    check_built(model)
    keys = keras_private.weight_keys(model)
    groups = _groups(model)
    numbers = {group: count() for group in ("model", "seeds", "optimizer", "metrics")}
    tensors = []
    for variable in rank_consistency.variables_of(model):
        group = groups.get(id(variable), "model")
        name = keys.get(id(variable)) or f"{group}/{next(numbers[group])}"
        tensors.append(of_variable(name, group, variable, session))
    seed = keras_private.global_seed()
    if seed is not None:
        tensors.append(of_variable(_GLOBAL_SEED, "global seed", seed, session))
    for number, buffer in enumerate(torch_modules.buffers(model)):
        tensors.append(_of_buffer(f"buffers/{number}", buffer, session))
    return tensors


def weights_of(model: keras.Model, session: Session | None) -> list[StateTensor]:
    """Lists the weights of a built model, each named by its path."""
    check_built(model)
    return [of_variable(v.path, "model", v, session) for v in model.weights]


def check_built(model: keras.Model) -> None:
    """Refuses a model that has no variables yet."""
    if not model.built:
        raise CheckpointError(
            f"Model {model.name!r} is not built, so it has no variables: give it an Input, or "
            "call it on a batch.",
            name=model.name,
        )


def mesh_of(session: Session | None) -> Mesh:
    """Looks up the mesh of a session; without one a model has a mesh of one device."""
    return Mesh((1,), ("data",)) if session is None else session.mesh


def generators() -> dict[str, str]:
    """Encodes the states of torch's generators in hex, by device; that of a GPU if it is in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: state.numpy().tobytes().hex() for device, state in states.items()}


def generators_of(states: Mapping[str, str], checkpoint: Path) -> dict[str, torch.Tensor]:
    """Decodes the states that `generators` has written, for the devices that exist here.

    Raises:
        CheckpointError: If they are no states of this release of torch.
    """
    generator_states = {}
    try:
        for device, text in states.items():
            if device == "cpu" or torch.cuda.is_available():
                state = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
                torch.Generator(device).set_state(state)
                generator_states[device] = state
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The state of torch's generator in {str(checkpoint)!r} does not fit torch "
            f"{torch.__version__} ({error}): load it with the release that saved it.",
            name=str(checkpoint),
        ) from None
    return generator_states


def set_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Sets torch's generators, of the current GPU only."""
    for device, value in states.items():
        torch.set_rng_state(value) if device == "cpu" else torch.cuda.set_rng_state(value)


def _groups(model: keras.Model) -> dict[int, str]:
    """Groups the variables that are no weights, by the `id` of each."""
    optimizer = getattr(model, "optimizer", None)
    return {
        **{
            id(variable): "seeds" for variable in model.variables if keras_private.is_seed(variable)
        },
        **{id(variable): "optimizer" for variable in getattr(optimizer, "variables", ())},
        **{id(variable): "metrics" for variable in getattr(model, "metrics_variables", None) or ()},
    }


def of_variable(
    name: str, group: str, variable: keras.Variable, session: Session | None
) -> StateTensor:
    """Describes a variable, and views its local shard."""
    shape, layout = tuple(variable.shape), storage_of(variable).layout
    if session is None or layout is None:
        local, layout = tensor_of(variable), Layout.replicated(mesh_of(session), len(shape))
    else:
        local = session.strategy.to_local(tensor_of(variable))
    return StateTensor(name, variable.path, group, shape, layout, local.detach())


def _of_buffer(name: str, buffer: torch.Tensor, session: Session | None) -> StateTensor:
    layout, local = None, buffer
    if session is not None and session.strategy.owns(buffer):
        layout, local = session.strategy.layout(buffer), session.strategy.to_local(buffer)
    if layout is None:
        layout = Layout.replicated(mesh_of(session), buffer.ndim)
    return StateTensor(name, name, "model", tuple(buffer.shape), layout, local.detach())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Views a contiguous tensor on the CPU as bytes, which share its memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def contents(tensors: Mapping[str, StateTensor], pieces: Iterable[Piece]) -> Iterator[Content]:
    """Yields each piece with a copy of its values in the memory of the host."""
    for piece in pieces:
        part = tensors[piece.variable].local[piece.local.slices]
        copied = part.to("cpu", copy=True, memory_format=torch.contiguous_format)
        yield Content(piece.key, piece.dtype, tuple(part.shape), bytes_of(copied))


def callback_states(
    callbacks: Iterable[Callback], session: Session | None
) -> tuple[dict[str, dict[str, Any]], list[StateTensor]]:
    """Splits the states of callbacks, equal on all ranks, into JSON and the arrays in it.

    Callbacks of Keras have known attributes. Others give their state by `state_dict()`, if they
    have it.
    """
    states: dict[str, dict[str, Any]] = {}
    arrays: dict[str, torch.Tensor] = {}
    for name, callback in _named(callbacks):
        states[name] = {
            key: _to_json(f"{name}/{key}", value, arrays) for key, value in _state(callback).items()
        }
    mesh = mesh_of(session)
    return states, [
        StateTensor(
            name, name, "callbacks", tuple(value.shape), Layout.replicated(mesh, value.ndim), value
        )
        for name, value in arrays.items()
    ]


def restore_callbacks(
    callbacks: Iterable[Callback],
    states: Mapping[str, Mapping[str, object]],
    arrays: Mapping[str, torch.Tensor],
) -> None:
    """Restores the states that `callback_states` has split, of the same callbacks."""
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
    """Moves arrays, alone or in a list, out of `value` into `arrays`."""
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
