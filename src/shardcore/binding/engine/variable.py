"""Patches: the torch `Variable`, whose tensor the strategy stores, and its conversion to NumPy."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy
import torch
from keras import Variable

from shardcore.binding import keras_private
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.keras_private.variables import set_tensor, storage_of, tensor_of
from shardcore.binding.ranks.collective_errors import check_other_ranks, is_in_collective_work
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.types import Original
from shardcore.domain.errors import ArgumentProblem, CallProblem
from shardcore.domain.layouts.layout import Layout
from shardcore.ports import contract
from shardcore.ports.strategy import NewVariable
from shardcore.reporting.logs import log_of

logger = log_of("variables")


@replaces(
    "keras.src.backend.common.variables:Variable.__init__",
    reason="Drops the layout that an optimizer gives its variables.",
    until=(3, 14),
)
def keep_layout(
    original: Callable[..., None],
    variable: Variable,
    *args: object,
    layout: object = None,
    **kwargs: object,
) -> None:
    """Replaces `Variable.__init__` of Keras 3.13 and 3.14, which drops the layout."""
    keras_private.set_layout(variable, layout)
    original(variable, *args, **kwargs)


@replaces(
    "keras.src.backend.torch.core:Variable._initialize",
    reason="The torch variable ignores its layout.",
)
def initialize(session: Session, original: Original, variable: Variable, value: object) -> None:
    """Replaces `Variable._initialize`, the only place with the full value."""
    if isinstance(value, torch.nn.Parameter) and session.mesh.size > 1:
        raise ArgumentProblem(
            f"Variable {variable.path!r} was given a torch Parameter, which is kept elsewhere too, "
            f"so it cannot be laid over mesh {session.mesh}. Give its module to "
            "keras.layers.TorchModuleWrapper, or the variable a copy: parameter.detach().",
            name=variable.path,
        )
    original(variable, value)
    store_variable(variable, session)


def assign(sessions: Sessions, original: Original, variable: Variable, value: torch.Tensor) -> None:
    """Replaces `Variable._direct_assign`: redistributes the value to the variable's layout."""
    strategy = strategy_of(variable, sessions)
    if strategy is None:
        original(variable, value)
        return
    _check_thread(variable, sessions)
    if sessions.sums.defer(variable, value, strategy):
        return
    with torch.no_grad():
        strategy.assign(tensor_of(variable), value)


def _check_thread(variable: Variable, sessions: Sessions) -> None:
    """Refuses a write on a thread whose order among the steps may differ between ranks.

    The state of a random generator may be written there: it counts the draws, whose number is
    equal on all ranks.
    """
    if threading.current_thread() is threading.main_thread() or keras_private.is_seed(variable):
        return
    world = storage_of(variable).session.world
    if world.mesh.size > 1 and sessions.current() is None:
        raise CallProblem(
            f"Variable {variable.path!r}, which all ranks keep, was assigned on thread "
            f"{threading.current_thread().name!r}, which has no distribution: each rank would take "
            "the value at another step. Assign it on the main thread (for a callback: set "
            "`async_safe = False`); or, if the main thread waits meanwhile, inside `with "
            "distribution.scope():` on this thread.",
            name=variable.path,
        )


@replaces(
    "keras.src.backend.common.variables:AutocastScope.maybe_cast",
    reason=(
        "Infers shapes with variables in the wrong dtype. If that fails, each rank runs the "
        "model on the global batch."
    ),
)
def cast(original: Callable[..., Any], scope: object, value: Any) -> Any:
    """Replaces `AutocastScope.maybe_cast`: casts on the meta device while Keras infers shapes.

    Keras casts the values, and then takes a meta tensor of the dtype of the variable instead.
    """
    if keras_private.is_symbolic():
        value = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return original(scope, value)


@replaces(
    "keras.src.backend.torch.core:Variable.__repr__",
    reason="Prints the value: a collective, though one rank prints.",
)
def represent(_original: Callable[..., str], variable: Variable) -> str:
    """Replaces `Variable.__repr__`: prints the layout instead of a value that is sharded."""
    layout = storage_of(variable).layout
    if layout is None or layout.is_replicated or layout.mesh.size == 1:
        return keras_private.repr_with_value(variable)
    return (
        f"<Variable path={variable.path}, shape={tuple(variable.shape)}, "
        f"dtype={variable.dtype}, layout={layout} on mesh {layout.mesh}>"
    )


@replaces(
    "keras.src.backend.torch.core:convert_to_numpy",
    reason="NumPy gets the full value.",
    everywhere=True,
)
def to_numpy(sessions: Sessions, original: Original, x: object) -> Any:
    """Replaces `convert_to_numpy`: all-gathers sharded tensors, alone or in a list, first."""
    value: Any = getattr(x, "value", x)  # of a Keras variable
    if isinstance(value, list | tuple):
        return original([full_tensor(getattr(part, "value", part), sessions) for part in value])
    if isinstance(value, numpy.ndarray) and is_in_collective_work():
        return value  # that a file gets: Keras converts it twice, each time by a copy
    strategy = sessions.strategy_of_tensor(value)
    if strategy is None:
        return original(value)
    full = full_tensor(value, sessions)
    # A replicated tensor is its own full tensor: there the array has to be the copy of Keras.
    storages = {t.untyped_storage().data_ptr() for t in (full, strategy.to_local(value))}
    return original(full) if len(storages) == 1 else _array(full)


def _array(gathered: torch.Tensor) -> Any:
    """Views the `gathered` tensor as an array, where Keras makes copies.

    NumPy knows no bfloat16, so torch does not convert it (pytorch/pytorch#90574).
    """
    host = gathered.cpu()
    if host.dtype is torch.bfloat16:
        return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()


def full_tensor(tensor: Any, sessions: Sessions) -> Any:
    """All-gathers `tensor`, a collective, if it is sharded; a plain one stays as it is."""
    strategy = sessions.strategy_of_tensor(tensor)
    if strategy is None:
        return tensor
    layout = strategy.layout(tensor)
    if layout is None or layout.is_replicated:
        return strategy.full_tensor(tensor)
    check_other_ranks()  # in the work of all ranks, which are together already
    call = f"the reading of a value of shape {tuple(tensor.shape)}, {layout}"
    with nullcontext() if is_in_collective_work() else sessions.collective_call(call):
        return strategy.full_tensor(tensor)


def strategy_of(variable: Variable, sessions: Sessions) -> Any:
    """Looks up the strategy that stores `variable`; None for one that was never laid out."""
    session = storage_of(variable).session
    return None if session is None else sessions.strategy(session.world)


def store_variable(
    variable: Variable,
    session: Session,
    layout: Layout | None = None,
    *,
    of_optimizer: bool = False,
) -> None:
    """Stores the full value of `variable`, equal on all ranks, by the session's strategy.

    By default the strategy derives its storage layout from the layout of the distribution.
    """
    keras_private.update_shape(variable)
    ruled = layout is None and keras_private.layout_of(variable) is None
    rule = session.rule(variable.path) if ruled else None
    new = new_variable(variable, session, layout, of_optimizer)
    if layout is None:
        layout = contract.storage_layout(session.entry, session.strategy, new)
    stored = torch.nn.Parameter(
        session.create_tensor(tensor_of(variable).detach(), layout, new),
        requires_grad=tensor_of(variable).requires_grad,
    )
    if stored.requires_grad:
        session.strategy.redistribute_gradients(stored, layout)
    set_tensor(variable, stored)
    keras_private.set_layout(variable, session.keras_layout(layout))
    keras_private.set_storage(variable, keras_private.Storage(session, layout, ruled, rule))
    if rule and not new.of_optimizer:
        session.used_rules.add(rule.key)
    logger.debug(
        "variable %s: shape %s, rule %r, spec %s, placements %s, local shape %s",
        variable.path,
        tuple(variable.shape),
        rule.key if rule else None,
        layout,
        "[" + ", ".join(map(str, layout.placements)) + "]",
        layout.local_shape(variable.shape, session.world.position),
    )


def ruled_layout(variable: Variable, session: Session) -> Layout:
    """Asks the strategy for the storage layout of a `variable` that is not stored yet (ADR 14)."""
    return contract.storage_layout(session.entry, session.strategy, new_variable(variable, session))


def new_variable(
    variable: Variable, session: Session, layout: Layout | None = None, of_optimizer: bool = False
) -> NewVariable:
    """Describes `variable` to a strategy; by default in the layout that the distribution gives."""
    path, shape = variable.path, tuple(variable.shape)
    if layout is None:
        layout = session.packed.get(path)
    if layout is None:
        rule_layout: Layout = session.distribution.get_variable_layout(variable).backend_layout
        layout = rule_layout.fitting(shape, f"Variable {path!r}")
    of_optimizer = of_optimizer or keras_private.is_made_by_optimizer()
    return NewVariable(path, shape, layout, session.batch_axes, of_optimizer)
