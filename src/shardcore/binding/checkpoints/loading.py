"""Loads a checkpoint: everything is checked on all ranks, then values are read (ADR 31)."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import attrs
import keras
import torch

from shardcore.binding import keras_private
from shardcore.binding.checkpoints import state
from shardcore.binding.checkpoints.saving import run_collectively, session_of
from shardcore.binding.checkpoints.state import StateTensor
from shardcore.binding.ranks import rank_consistency
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.domain.checkpoints.contents import Loaded, VariableMatch, match
from shardcore.domain.checkpoints.grid import HeldPart, held_parts
from shardcore.domain.checkpoints.index import Index, StoredVariable
from shardcore.domain.errors import CheckpointError
from shardcore.ports.checkpoints import CheckpointStore, Reader

# Groups that a checkpoint may have, or lack: a model before its first step has no metrics yet.
_OPTIONAL = ("metrics", "global seed", "callbacks")


@attrs.frozen(eq=False)
class Loading:
    """A checkpoint that is loaded into a model.

    Args:
        path: The folder.
        index: Its index.
        report: The report for the caller.
        arrays: The tensors of callbacks, by name.
    """

    path: Path
    index: Index
    report: Loaded
    arrays: dict[str, torch.Tensor]


def load(
    path: Path, model: keras.Model, strict: bool, sessions: Sessions, store: CheckpointStore
) -> Loading:
    """Loads a checkpoint into a built model. A collective.

    Args:
        path: The folder of a checkpoint, or the directory of several, for the newest complete one.
        model: The model, under the distribution that it has to have.
        strict: Whether all variables have to fit; else those that fit are loaded.
        sessions: The sessions of this process.
        store: The store of checkpoints.

    Raises:
        CheckpointError: On all ranks, before a value of the model has changed.
    """
    session = session_of(model, sessions, "load_checkpoint")
    checkpoint = _find(path, session, sessions, store)
    index = _index(checkpoint, session, sessions, store)
    _make_missing(model, index)
    tensors = {tensor.name: tensor for tensor in state.tensors_of(model, session)}
    compiled = getattr(model, "optimizer", None) is not None
    optional = _OPTIONAL if compiled else (*_OPTIONAL, "optimizer")
    matched = match([tensor.to_load() for tensor in tensors.values()], index.variables, optional)
    if strict:
        matched.check(str(checkpoint))
    position, ranks = (0, 1) if session is None else (session.world.position, session.mesh.size)
    arrays = _arrays(index)
    generators: dict[str, torch.Tensor] = {}
    count = 0

    with store.reading(checkpoint, index, position, ranks) as reader:

        def check() -> None:
            reader.verify()
            for name, stored in matched.pairs.items():
                reader.check(stored, _parts(tensors[name], position))
            for stored, _ in arrays:
                reader.check(stored, stored.as_one_part)
            stored_states = index.state.get("generators", {})
            generators.update(state.generators_of(stored_states, checkpoint))

        def read() -> None:
            nonlocal count
            for name, stored in matched.pairs.items():
                count += _read(reader, stored, tensors[name], _parts(tensors[name], position))
            for stored, array in arrays:
                reader.read(stored, stored.as_one_part, stored.shape, state.bytes_of(array))
            state.set_generators(generators)

        run_collectively(check, f"check checkpoint {str(checkpoint)!r}", session, sessions)
        run_collectively(read, f"read checkpoint {str(checkpoint)!r}", session, sessions)
    report = _report(checkpoint, index, matched, count)
    return Loading(checkpoint, index, report, {stored.name: array for stored, array in arrays})


def choose_on_rank_0(
    choose: Callable[[], Path | None], what: str, session: Session | None, sessions: Sessions
) -> Path | None:
    """Returns the checkpoint that rank 0 chooses, None if it finds none. A collective."""
    chosen: list[Path | None] = []

    def work() -> None:
        if session is None or session.processes.rank == 0:
            chosen.append(choose())

    run_collectively(work, what, session, sessions)
    if session is None:
        return chosen[0]
    path: Path | None = session.processes.gather(chosen)[0][0]
    return path


def _find(path: Path, session: Session | None, sessions: Sessions, store: CheckpointStore) -> Path:
    """Returns the folder of the checkpoint that `path` names."""
    what = f"look for a checkpoint in {str(path)!r}"
    checkpoint = choose_on_rank_0(lambda: store.find(path), what, session, sessions)
    if checkpoint is None:
        raise CheckpointError(
            f"{str(path)!r} is no complete checkpoint and has none: give a folder that "
            "shardcore.save_checkpoint() has returned, or the directory that it was given.",
            name=str(path),
        )
    return checkpoint


def _index(
    checkpoint: Path, session: Session | None, sessions: Sessions, store: CheckpointStore
) -> Index:
    """Returns the index, which every rank reads, and which is equal on all."""
    indexes: list[Index] = []
    run_collectively(
        lambda: indexes.append(store.index(checkpoint)),
        f"read the index of checkpoint {str(checkpoint)!r}",
        session,
        sessions,
    )
    if session is not None:
        digest = hashlib.sha256(indexes[0].to_text().encode()).hexdigest()
        rank_consistency.compare(
            {f"checkpoint {str(checkpoint)!r}": f"index {digest[:12]}"}, session
        )
    return indexes[0]


def _make_missing(model: keras.Model, index: Index) -> None:
    """Makes the variables that Keras makes at the first step only, if the checkpoint has them."""
    optimizer = getattr(model, "optimizer", None)
    groups = [variable.group for variable in index.variables]
    if optimizer is not None and groups.count("optimizer") > len(optimizer.variables):
        optimizer.build(model.trainable_variables)
    if "global seed" in groups:
        keras_private.make_global_seed()


def _parts(tensor: StateTensor, position: int) -> list[HeldPart]:
    return held_parts(tensor.layout, tensor.shape, position)


def _arrays(index: Index) -> list[tuple[StoredVariable, torch.Tensor]]:
    """Returns the tensors of callbacks, each with an array for its values."""
    return [
        (variable, torch.empty(variable.shape, dtype=getattr(torch, variable.dtype)))
        for variable in index.variables
        if variable.group == "callbacks"
    ]


def _read(
    reader: Reader, stored: StoredVariable, tensor: StateTensor, parts: list[HeldPart]
) -> int:
    """Reads the local shard of a tensor, and returns the bytes that were read."""
    values = torch.empty(tensor.local.shape, dtype=tensor.local.dtype)
    count = reader.read(stored, parts, tuple(values.shape), state.bytes_of(values))
    with torch.no_grad():
        tensor.local.copy_(values)
    return count


def _report(checkpoint: Path, index: Index, matched: VariableMatch, count: int) -> Loaded:
    return Loaded(
        path=str(checkpoint),
        step=index.step,
        state=index.state.get("user", {}),
        variables=tuple(matched.pairs),
        problems=matched.problems,
        unused=(*matched.unused, *matched.optional),
        bytes_read=count,
    )
