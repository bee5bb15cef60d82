"""The vocabulary of an embedding or a head, resized: old rows stay, on any mesh."""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import keras
import torch
from keras import Layer, Variable
from keras.layers import Dense, Embedding

from shardcore.binding import keras_private, torch_modules
from shardcore.binding.engine import torch_state
from shardcore.binding.engine.variable import full_tensor, store_variable
from shardcore.binding.keras_private.variables import set_tensor, storage_of, tensor_of
from shardcore.binding.ranks.session import Sessions
from shardcore.domain.errors import ArgumentProblem, CallProblem
from shardcore.domain.layouts.layout import Layout

Initializer = Callable[..., Any]


@attrs.frozen(eq=False)
class _Part:
    """A variable of a layer, and the dim of it that counts the vocabulary."""

    variable: Variable
    dim: int
    initializer: Initializer


@attrs.frozen
class Vocabulary:
    """The vocabularies of layers, for the session of their variables."""

    sessions: Sessions

    def resize(
        self, layer: Layer, size: int, initializer: object, model: keras.Model | None
    ) -> None:
        """Resizes the variables of `layer`, and the slots that `model`'s optimizer has of them."""
        _check(layer, size)
        draw = None if initializer is None else keras.initializers.get(initializer)
        parts = list(_parts(layer, draw))
        optimizer = getattr(model, "optimizer", None)  # of a compiled model
        slots = {} if optimizer is None else keras_private.weights_by_moment(optimizer, model)
        for part in parts:
            if optimizer is not None:
                _check_slots(part.variable, optimizer, slots)
        before = [tensor_of(part.variable) for part in parts]
        with self.sessions.collective_call(f"resize({layer.path!r}, {size})"):
            for part in parts:
                of_part = [
                    v
                    for v in getattr(optimizer, "variables", ())
                    if slots.get(id(v)) is part.variable
                ]
                self._resize_part(part, size, of_part, optimizer)
        new = {id(old): tensor_of(part.variable) for old, part in zip(before, parts, strict=True)}
        # Each layer that holds the layer has its parameters too.
        for _, module in keras_private.modules_of(model or layer):
            if not isinstance(module, Layer):
                torch_state.replace_tensors(module, new)
        _set_config(layer, size, model)

    def _resize_part(
        self, part: _Part, size: int, slots: list[Variable], optimizer: object
    ) -> None:
        variable, dim = part.variable, part.dim
        rows = self._new_rows(part, size)
        for slot in slots:
            self._store(slot, dim, size, _rows_of_slot(slot, optimizer, rows), variable)
        self._store(variable, dim, size, rows, None)

    def _new_rows(self, part: _Part, size: int) -> torch.Tensor:
        """Draws the new rows, the same on all ranks: those of a whole new variable behind the old.

        An initializer with a seed draws the same numbers each time: new rows that are drawn alone
        would be the first rows once more.
        """
        shape, old = list(part.variable.shape), part.variable.shape[part.dim]
        shape[part.dim] = max(size, old)
        value = keras.ops.convert_to_tensor(part.initializer(shape, dtype=part.variable.dtype))
        rows: torch.Tensor = value.detach().narrow(part.dim, old, shape[part.dim] - old)
        session = storage_of(part.variable).session or self.sessions.current()
        if session is None or session.mesh.size == 1:
            return rows
        sent = rows.cpu() if session.processes.rank == 0 else torch.empty(0)
        return session.processes.gather(sent)[0].to(rows.device)

    def _store(
        self, variable: Variable, dim: int, size: int, rows: torch.Tensor, weight: Variable | None
    ) -> None:
        """Stores the first rows of `variable`, and new ones, laid out again by its rule."""
        before, storage = tensor_of(variable), storage_of(variable)
        old = full_tensor(before.detach(), self.sessions)
        kept = old.narrow(dim, 0, min(size, old.shape[dim]))
        value = torch.cat([kept, rows.to(old.dtype)], dim)
        set_tensor(variable, torch.nn.Parameter(value, requires_grad=before.requires_grad))
        if storage.session is None:
            keras_private.update_shape(variable)
            return
        layout = None
        if not storage.is_ruled and storage.layout is not None and weight is None:
            layout = Layout(storage.session.mesh, storage.layout.spec)  # that the user has given
        keras_private.set_layout(
            variable, None if weight is None else keras_private.layout_of(weight)
        )
        store_variable(variable, storage.session, layout, of_optimizer=weight is not None)
        torch_modules.follow(variable, before)


def _check(layer: object, size: object) -> None:
    if not isinstance(layer, Embedding | Dense):
        raise ArgumentProblem(
            name="resize(layer)",
            expected="a layer with a vocabulary (Embedding, ReversibleEmbedding or Dense)",
            got=f"{type(layer).__name__} {getattr(layer, 'name', '')!r}",
        )
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ArgumentProblem(
            name="resize(vocabulary)", expected="a number of tokens, from 1 on", got=repr(size)
        )
    if not layer.built:
        raise CallProblem(
            f"Layer {layer.name!r} is not built: make it with another vocabulary, or build it.",
            name=layer.name,
        )
    for is_so, what in (
        (layer.quantization_mode, "quantized"),
        (layer.lora_enabled, "LoRA-enabled"),
    ):
        if is_so:
            raise CallProblem(
                f"Layer {layer.name!r} is {what}: resize its vocabulary before that.",
                name=layer.name,
            )


def _parts(layer: Layer, initializer: Initializer | None) -> Iterator[_Part]:
    if isinstance(layer, Dense):
        yield _Part(layer.kernel, 1, initializer or layer.kernel_initializer)
        if layer.bias is not None:
            yield _Part(layer.bias, 0, layer.bias_initializer)
        return
    draw = initializer or layer.embeddings_initializer
    yield _Part(layer.embeddings, 0, draw)
    if hasattr(layer, "reverse_embeddings"):  # of a layer whose weights are not tied
        yield _Part(layer.reverse_embeddings, 1, draw)


def _check_slots(weight: Variable, optimizer: Any, slots: dict[int, Variable]) -> None:
    """Refuses an optimizer with slots of other shapes than the weight, as those of `Adafactor`."""
    begin = f"{weight.path.replace('/', '_')}_"
    for slot in optimizer.variables:
        is_of_weight = slot.name == weight.name or slot.name.startswith(begin)
        if is_of_weight and id(slot) not in slots and slot.shape:
            raise CallProblem(
                f"{type(optimizer).__name__} has a slot {slot.name!r} of shape {tuple(slot.shape)} "
                f"for {weight.path!r} of shape {tuple(weight.shape)}, which cannot be resized: "
                "call resize() without model=, and compile the model again.",
                name=weight.path,
            )


def _rows_of_slot(slot: Variable, optimizer: object, rows: torch.Tensor) -> torch.Tensor:
    """Makes the new rows of a slot, as the optimizer begins them.

    An average of the weight begins at its values, an accumulator of Adagrad and Ftrl above zero.
    """
    if slot.name.endswith("average"):
        return rows
    is_accumulator = slot.name.endswith("accumulator")
    begin = getattr(optimizer, "initial_accumulator_value", 0.0) if is_accumulator else 0.0
    return torch.full_like(rows, begin)


def _set_config(layer: Layer, size: int, model: keras.Model | None) -> None:
    """Sets the size in the configuration of the layer, and of what holds it in keras-hub."""
    name = "units" if isinstance(layer, Dense) else "input_dim"
    old = getattr(layer, name)
    setattr(layer, name, size)
    for owner in [] if model is None else keras_private.layers_of(model):
        holds = layer in keras_private.layers_of(owner)
        if holds and getattr(owner, "vocabulary_size", None) == old:
            owner.vocabulary_size = size
