"""Lays out models, optimizers and metrics that were made before the distribution (ADR 29)."""

from collections.abc import Callable, Iterable

import torch
from keras import Variable
from keras.layers import Layer, TorchModuleWrapper

from shardcore.binding import keras_private
from shardcore.binding.engine import torch_state
from shardcore.binding.engine.variable import assign as assign_to_sharded
from shardcore.binding.engine.variable import store_variable
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.keras_private.variables import set_tensor, storage_of, tensor_of
from shardcore.binding.ranks import rank_consistency
from shardcore.binding.ranks.session import Session, Sessions


@replaces(
    "keras.src.backend.torch.core:Variable._direct_assign",
    reason="The value is redistributed to the variable's layout.",
)
def assign(
    sessions: Sessions, original: Callable[..., None], target: Variable, value: torch.Tensor
) -> None:
    """Replaces `Variable._direct_assign`; lays out the variable for the value of a step.

    A metric or a seed generator that was made before the distribution is laid out here.
    """
    if sessions.are_open() and storage_of(target).layout is None:
        session = sessions.current()
        if session is not None and session.strategy.owns(value):
            lay_out([target], session)
    assign_to_sharded(sessions, original, target, value)


def adopt(owner: Layer, session: Session) -> None:
    """Lays out the variables of `owner` that were made before the distribution, by their rules.

    Args:
        owner: A layer, or a model with its optimizer and metrics.
        session: The session of the distribution.

    Raises:
        RankMismatchError: If the ranks have other values.
    """
    made_before = [v for v in rank_consistency.variables_of(owner) if storage_of(v).layout is None]
    if made_before:
        lay_out(made_before, session, owner)


def lay_out(variables: Iterable[Variable], session: Session, owner: Layer | None = None) -> None:
    """Lays `variables` out by the rules of the distribution, also if they are laid out already.

    Args:
        variables: Keras variables.
        session: The session of the distribution.
        owner: The layer or model that holds them. A moment of its optimizer gets the layout of the
            weight that it belongs to, and its torch modules get the new tensors.

    Raises:
        RankMismatchError: If the ranks have other values of a variable without a layout.
    """
    variables = list(variables)
    rank_consistency.compare_values([v for v in variables if storage_of(v).layout is None], session)
    store_variables(variables, session, owner)


def store_variables(
    variables: Iterable[Variable], session: Session, owner: Layer | None = None
) -> None:
    """Lays `variables` out as `lay_out` does, whose values are known to be equal on all ranks."""
    optimizer = getattr(owner, "optimizer", None)
    weights = {} if optimizer is None else keras_private.weights_by_moment(optimizer, owner)
    of_optimizer = {id(v) for v in getattr(optimizer, "variables", ())}
    replaced: dict[int, torch.Tensor] = {}
    weights_first = sorted(variables, key=lambda variable: id(variable) in weights)
    for variable in weights_first:
        before = tensor_of(variable)
        if (earlier := storage_of(variable).session) is not None:
            value = earlier.strategy.full_tensor(before).detach()
            set_tensor(variable, torch.nn.Parameter(value, requires_grad=before.requires_grad))
        weight = weights.get(id(variable))
        layout = None if weight is None else keras_private.layout_of(weight)
        keras_private.set_layout(variable, layout)
        store_variable(variable, session, of_optimizer=id(variable) in of_optimizer)
        replaced[id(before)] = tensor_of(variable)
    if owner is not None:
        _replace(owner, replaced, session)


def _replace(owner: Layer, replaced: dict[int, torch.Tensor], session: Session) -> None:
    """Replaces tensors in the torch modules of `owner`, whose buffers are replicated."""
    modules = [module for _, module in keras_private.modules_of(owner)]
    for wrapper in modules:
        if isinstance(wrapper, TorchModuleWrapper):
            replaced |= torch_state.buffers(wrapper, session)
    for module in modules:
        if not isinstance(module, Layer):
            torch_state.replace_tensors(module, replaced)
