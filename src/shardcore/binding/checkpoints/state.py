"""The tensors of a model that a checkpoint has, and the states of torch's generators."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path

import attrs
import keras
import torch

from shardcore.binding import keras_private
from shardcore.binding.keras_private.variables import tensor_of
from shardcore.binding.ranks import rank_consistency
from shardcore.binding.ranks.session import Session, stored_layout
from shardcore.binding.torch_modules import wrapper
from shardcore.domain.checkpoints.contents import Piece, VariableToLoad, VariableToStore
from shardcore.domain.errors import CheckpointError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports.checkpoints import Content

# The mesh of a model without a distribution.
ONE_DEVICE = Mesh((1,), ("data",))
# The name of the seed of random functions that get none.
GLOBAL_SEED = "global_seed"


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
        """Returns what the division of the writing needs of it."""
        return VariableToStore(
            self.name, self.path, self.group, self.shape, self.dtype, self.layout
        )

    def to_load(self) -> VariableToLoad:
        """Returns what the match with a checkpoint needs of it."""
        return VariableToLoad(self.name, self.path, self.group, self.shape, self.dtype)


def tensors_of(model: keras.Model, session: Session | None) -> list[StateTensor]:
    """Returns the tensors of a built model: its weights and seeds, its optimizer, its metrics.

    Each has the key that Keras gives it in weight files; a seed, and a variable of a layer that
    Keras saves in another form, has its number.
    """
    if not model.built:
        raise CheckpointError(
            f"Model {model.name!r} is not built, so it has no variables: give it an Input, call it "
            "on a batch, or call model.build(shape).",
            name=model.name,
        )
    keys = keras_private.weight_keys(model)
    groups = _groups(model)
    numbers = {group: count() for group in ("model", "seeds", "optimizer", "metrics")}
    tensors = []
    for variable in rank_consistency.variables_of(model):
        group = groups.get(id(variable), "model")
        name = keys.get(id(variable)) or f"{group}/{next(numbers[group])}"
        tensors.append(_of_variable(name, group, variable, session))
    seed = keras_private.global_seed()
    if seed is not None:
        tensors.append(_of_variable(GLOBAL_SEED, "global seed", seed, session))
    for number, buffer in enumerate(wrapper.buffers(model)):
        tensors.append(_of_buffer(f"buffers/{number}", buffer, session))
    return tensors


def replicated_tensor(name: str, value: torch.Tensor, mesh: Mesh) -> StateTensor:
    """Returns the state of a callback, a plain tensor that is equal on all ranks."""
    layout = Layout.replicated(mesh, value.ndim)
    return StateTensor(name, name, "callbacks", tuple(value.shape), layout, value)


def generators() -> dict[str, str]:
    """Returns the states of torch's generators, as texts; of the GPU if one is in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: state.numpy().tobytes().hex() for device, state in states.items()}


def generators_of(states: Mapping[str, str], checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns the states that `generators` has written, for the devices that exist here.

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
    """Sets torch's generators."""
    for device, value in states.items():
        torch.set_rng_state(value) if device == "cpu" else torch.cuda.set_rng_state(value)


def _groups(model: keras.Model) -> dict[int, str]:
    """Returns the group of each variable that is no weight, by its `id`."""
    optimizer = getattr(model, "optimizer", None)
    return {
        **{
            id(variable): "seeds" for variable in model.variables if keras_private.is_seed(variable)
        },
        **{id(variable): "optimizer" for variable in getattr(optimizer, "variables", ())},
        **{id(variable): "metrics" for variable in getattr(model, "metrics_variables", None) or ()},
    }


def _of_variable(
    name: str, group: str, variable: keras.Variable, session: Session | None
) -> StateTensor:
    shape, layout = tuple(variable.shape), stored_layout(variable)
    if session is None or layout is None:
        mesh = ONE_DEVICE if session is None else session.mesh
        local, layout = tensor_of(variable), Layout.replicated(mesh, len(shape))
    else:
        local = session.strategy.to_local(tensor_of(variable))
    return StateTensor(name, variable.path, group, shape, layout, local.detach())


def _of_buffer(name: str, buffer: torch.Tensor, session: Session | None) -> StateTensor:
    layout, local = None, buffer
    if session is not None and session.strategy.owns(buffer):
        layout, local = session.strategy.layout(buffer), session.strategy.to_local(buffer)
    if layout is None:
        mesh = ONE_DEVICE if session is None else session.mesh
        layout = Layout.replicated(mesh, buffer.ndim)
    return StateTensor(name, name, "model", tuple(buffer.shape), layout, local.detach())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the CPU, whose memory they share."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def contents(tensors: Mapping[str, StateTensor], pieces: Iterable[Piece]) -> Iterator[Content]:
    """Yields each piece with a copy of its values in the memory of the host."""
    for piece in pieces:
        part = tensors[piece.variable].local[piece.local.slices]
        copied = part.to("cpu", copy=True, memory_format=torch.contiguous_format)
        yield Content(piece.key, piece.dtype, tuple(part.shape), bytes_of(copied))
