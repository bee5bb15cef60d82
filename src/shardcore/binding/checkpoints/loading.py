"""Loads a checkpoint: everything is checked on all ranks, then values are read (ADR 31)."""

from pathlib import Path

import attrs
import keras
import torch

from shardcore.binding import keras_private
from shardcore.binding.checkpoints import state
from shardcore.binding.ranks.session import Session
from shardcore.domain.checkpoints.contents import Loaded, VariableMatch, match
from shardcore.domain.checkpoints.grid import HeldPart, held_parts
from shardcore.domain.checkpoints.index import Index, StoredVariable
from shardcore.ports.checkpoints import Reader

# Groups that a checkpoint may have, or lack: a model before its first step has no metrics yet.
_OPTIONAL = ("metrics", "global seed", "callbacks")


@attrs.define(eq=False)
class Restore:
    """A checkpoint that is loaded into a model by `match`, `check` and `read`, in this order.

    None of them is a collective: the ranks agree on errors between them.

    Args:
        path: The folder of the checkpoint.
        index: Its index.
        model: The built model.
        session: The session of the model; None without a distribution.

    Attributes:
        arrays: The tensors of callbacks, by name; `read` gives them their values.
    """

    path: Path
    index: Index
    model: keras.Model
    session: Session | None
    arrays: dict[str, torch.Tensor] = attrs.field(init=False)
    _matched: VariableMatch = attrs.field(init=False)
    _wanted: list[tuple[StoredVariable, state.StateTensor, list[HeldPart]]] = attrs.field(
        factory=list, init=False
    )
    _of_callbacks: list[StoredVariable] = attrs.field(init=False)
    _generators: dict[str, torch.Tensor] = attrs.field(init=False)
    _bytes_read: int = attrs.field(default=0, init=False)

    def match(self, strict: bool) -> None:
        """Finds the stored variable for each one of the model.

        Raises:
            CheckpointError: If `strict`, and one does not fit.
        """
        optimizer = getattr(self.model, "optimizer", None)
        groups = [variable.group for variable in self.index.variables]
        # Keras makes these variables at the first step only.
        if optimizer is not None and groups.count("optimizer") > len(optimizer.variables):
            optimizer.build(self.model.trainable_variables)
        if "global seed" in groups:
            keras_private.make_global_seed()
        tensors = {tensor.name: tensor for tensor in state.tensors_of(self.model, self.session)}
        optional = (*_OPTIONAL, "optimizer") if optimizer is None else _OPTIONAL
        to_load = [tensor.to_load() for tensor in tensors.values()]
        self._matched = match(to_load, self.index.variables, optional)
        if strict:
            self._matched.check(str(self.path))
        position = 0 if self.session is None else self.session.world.position
        for name, stored in self._matched.pairs.items():
            tensor = tensors[name]
            parts = held_parts(tensor.layout, tensor.shape, position)
            self._wanted.append((stored, tensor, parts))
        self._of_callbacks = [v for v in self.index.variables if v.group == "callbacks"]
        self.arrays = {
            v.name: torch.empty(v.shape, dtype=getattr(torch, v.dtype)) for v in self._of_callbacks
        }

    def check(self, reader: Reader) -> None:
        """Checks all that `read` needs, while no value of the model has changed.

        Raises:
            CheckpointError: If a file is damaged, or a state of a generator is of another torch.
        """
        reader.verify()
        for stored, _, parts in self._wanted:
            reader.check(stored, parts)
        for stored in self._of_callbacks:
            reader.check(stored, stored.as_one_part)
        states = self.index.state.get("generators", {})
        self._generators = state.generators_of(states, self.path)

    def read(self, reader: Reader) -> None:
        """Reads the bytes of this rank's shards, and no others; sets torch's generators."""
        for stored, tensor, parts in self._wanted:
            values = torch.empty(tensor.local.shape, dtype=tensor.local.dtype)
            target = state.bytes_of(values)
            self._bytes_read += reader.read(stored, parts, tuple(values.shape), target)
            with torch.no_grad():
                tensor.local.copy_(values)
        for stored in self._of_callbacks:
            target = state.bytes_of(self.arrays[stored.name])
            reader.read(stored, stored.as_one_part, stored.shape, target)
        state.set_generators(self._generators)

    @property
    def report(self) -> Loaded:
        """The report for the caller, after `read`."""
        return Loaded(
            path=str(self.path),
            step=self.index.step,
            state=self.index.state.get("user", {}),
            variables=tuple(self._matched.pairs),
            problems=self._matched.problems,
            unused=(*self._matched.unused, *self._matched.optional),
            bytes_read=self._bytes_read,
        )
