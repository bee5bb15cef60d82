"""Patches for loops outside `fit`: the rows of each rank, and inputs that differ between ranks."""

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from keras import Layer, Model, Variable
from keras.losses import Loss
from keras.optimizers import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardcore.binding import keras_private
from shardcore.binding.data import batches
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks import rank_consistency
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.types import Original

# The updates of an optimizer, and the calls of a layer, whose plain inputs the ranks compare.
COMPARED = 3

Call = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a call


def is_in_loop(session: Session) -> bool:
    """Tells whether a call comes from the user's own loop, over several ranks."""
    return not session.runs and session.mesh.size > 1 and not keras_private.is_symbolic()


def join_rows(layer: Layer, call: Call, session: Session) -> Call:
    """Joins the rows of all ranks in the arguments of an outermost call.

    Without `auto_shard_dataset`, what a model gets as plain tensors are the rows of this rank.
    """
    if session.distribution.auto_shard_dataset or not isinstance(layer, Model):
        return call
    joined: Call = _join_rows(call, session)
    return joined


@replaces(
    "keras.src.losses.loss:Loss.__call__",
    reason="In a loop outside fit the targets may be the rows of one rank.",
)
def loss(
    sessions: Sessions,
    original: Original,
    function: Loss,
    y_true: object,
    y_pred: object,
    sample_weight: object = None,
) -> Any:
    """Replaces `Loss.__call__`: plain targets are the rows of this rank, like a model's inputs."""
    session = sessions.current()
    if session is not None and is_in_loop(session):
        is_shared = session.distribution.auto_shard_dataset
        if not is_shared and any(map(session.strategy.owns, keras_private.leaves(y_pred))):
            y_true, sample_weight = _join_rows((y_true, sample_weight), session)
    return original(function, y_true, y_pred, sample_weight)


def _join_rows(data: object, session: Session) -> Any:
    """Joins the rows of all ranks, unless the user has laid out a part of `data`."""
    leaves = keras_private.leaves(data)
    if any(map(session.strategy.owns, leaves)) or not any(map(_has_rows, leaves)):
        return data
    return batches.distribute(data, session)


def _has_rows(leaf: object) -> bool:
    return hasattr(leaf, "__array__") and len(getattr(leaf, "shape", ())) > 0


def note_inputs(layer: Layer, call: Call, outputs: object, session: Session) -> None:
    """Notes the plain inputs of an outermost call, if a gradient comes back to its outputs."""
    if session.compared.get(layer, 0) >= COMPARED:
        return
    for output in keras_private.leaves(outputs):
        if isinstance(output, torch.Tensor) and output.requires_grad:
            hooked: Any = output  # torch gives the function no types
            hooked.register_hook(lambda _: _note(layer, call, session))
            return


def _note(layer: Layer, call: Call, session: Session) -> None:
    plain = [
        leaf for leaf in keras_private.leaves(call) if _has_rows(leaf) and _is_plain(leaf, session)
    ]
    session.compared[layer] = session.compared.get(layer, 0) + 1
    for number, content in enumerate(rank_consistency.batch_facts(plain, session).values()):
        name = f"plain input {number} of {layer.name!r}, call {session.compared[layer]} in a loop"
        session.inputs[name] = content


def _is_plain(tensor: Any, session: Session) -> bool:
    return not session.strategy.owns(tensor)


@replaces(
    "keras.src.optimizers.base_optimizer:BaseOptimizer.apply",
    reason="Ranks with different inputs would train different weights in a loop outside fit.",
)
def keras_update(
    sessions: Sessions,
    original: Original,
    optimizer: Optimizer,
    grads: object,
    trainable_variables: Iterable[Variable] | None = None,
) -> Any:
    """Replaces `Optimizer.apply`: the ranks compare their plain inputs before the first updates."""
    session = sessions.current()
    updated = None if trainable_variables is None else list(trainable_variables)
    if session is not None and any(
        keras_private.storage_of(v).layout for v in updated or optimizer.variables
    ):
        _compare_inputs(optimizer, session)
    return original(optimizer, grads, updated)


def follow_torch_optimizers(sessions: Sessions, undo: ExitStack) -> None:
    """Compares plain inputs before the first updates by optimizers of torch, until `undo`."""

    def update(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        session = sessions.current()
        if session is not None:
            updated = (
                parameter for group in optimizer.param_groups for parameter in group["params"]
            )
            if any(map(session.strategy.owns, updated)):
                _compare_inputs(optimizer, session)

    undo.callback(register_optimizer_step_pre_hook(update).remove)


def _compare_inputs(optimizer: object, session: Session) -> None:
    """Compares the plain inputs of this rank's gradients with those of the others.

    Raises:
        RankMismatchError: If they differ: the ranks would train different weights.
    """
    inputs = dict(session.inputs)
    session.inputs.clear()
    if not is_in_loop(session) or session.compared.get(optimizer, 0) >= COMPARED:
        return
    if threading.current_thread() is not threading.main_thread():
        return  # ranks exchange values on the main thread only
    session.compared[optimizer] = session.compared.get(optimizer, 0) + 1
    rank_consistency.compare(inputs, session)
