"""Compares what every rank stores with what the layouts say."""

from typing import Any

import attrs
import torch

from shardcore.binding import agreement, batches, rules, seams, torch_modules
from shardcore.binding.session import Session, Sessions
from shardcore.binding.variable import storage_layout
from shardcore.domain.errors import StrategyError
from shardcore.domain.layout import Layout
from shardcore.reporting.verification import VariableCheck, Verification


def verify_model(model: Any, batch: Any, sessions: Sessions) -> Verification:
    """The report on the model's variables and its optimizer's. A collective."""
    session = sessions.required()
    if batch is not None:
        with session.strategy.scope():
            _backward(model, batch, session)
    report = rules.rules_report(model, session)
    checks = tuple(_check(variable, session) for variable in agreement.variables_of(model))
    return Verification(
        mesh=str(session.mesh),
        strategy=sessions.entry.name,
        rank=session.processes.rank,
        variables=checks,
        unused_rules=report.unused_rules if report else (),
    )


def _backward(model: Any, batch: Any, session: Session) -> None:
    """The gradients of one batch. What a forward pass updates is put back."""
    x, y, sample_weight = seams.unpack(batches.distribute(batch, session))
    state = [(v, v._value.detach().clone()) for v in model.non_trainable_variables]
    buffers = [(buffer, buffer.clone()) for buffer in torch_modules.buffers(model)]
    model.zero_grad()
    predictions = model(x, training=True)
    loss = model.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight)
    loss.backward()
    for variable, value in state:
        variable.assign(value)
    for buffer, value in buffers:
        buffer.copy_(value)


@attrs.frozen
class _Found:
    """What one rank has found of one variable."""

    stored: bool
    gradient_fits: bool | None
    value: str


def _check(variable: Any, session: Session) -> VariableCheck:
    layout = storage_layout(variable)
    if layout is None:
        raise StrategyError(
            f"Variable {variable.path!r} was made before the distribution was set, so it has no "
            "layout to verify: build the model after set_distribution(...)."
        )
    with torch.no_grad():
        local = session.strategy.local(variable._value)
        whole = session.strategy.whole(variable._value)
        gradient = _gradient_layout(variable, session)
        here = _Found(
            stored=_is_shard(local, whole, layout, session),
            gradient_fits=None if gradient is None else _fits(gradient, layout, variable, session),
            value=agreement.digest(whole),
        )
    everyone = session.processes.gather(here)
    fits = [found.gradient_fits for found in everyone]
    return VariableCheck(
        path=variable.path,
        rule=variable._shardcore_rule.key if variable._shardcore_rule else None,
        spec=str(layout),
        shape=tuple(variable.shape),
        local_shape=tuple(local.shape),
        bytes_here=_storage_bytes(local),
        bytes_whole=whole.nbytes,
        stored=all(found.stored and found.value == here.value for found in everyone),
        gradient=None if gradient is None else str(gradient),
        gradient_fits=None if None in fits else all(fits),
        stale=rules.stale_rule(variable, session),
    )


def _is_shard(local: Any, whole: Any, layout: Layout, session: Session) -> bool:
    """Whether `local` is this rank's slice of the whole, in a storage of just that size."""
    slices = layout.slices(whole.shape, session.world.position)
    size = local.element_size() * local.numel()
    return torch.equal(local, whole[slices]) and _storage_bytes(local) <= size


def _fits(gradient: Layout, layout: Layout, variable: Any, session: Session) -> bool:
    """Whether the gradient has, ready, just the part that this rank keeps of the variable."""
    shape, position = tuple(variable.shape), session.world.position
    same_part = gradient.slices(shape, position) == layout.slices(shape, position)
    return same_part and not gradient.partial


def _gradient_layout(variable: Any, session: Session) -> Layout | None:
    gradient = variable._value.grad
    if gradient is None:
        return None
    return session.strategy.layout(gradient) or Layout.replicated(session.mesh, gradient.ndim)


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
