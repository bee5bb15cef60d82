"""The function behind `shardcore.verify()`: compares stored shards with the layouts."""

import keras
import torch

from shardcore.binding import keras_private, torch_modules
from shardcore.binding.cost import rules_report
from shardcore.binding.data import batches
from shardcore.binding.engine import adoption
from shardcore.binding.keras_private.variables import storage_of, tensor_of
from shardcore.binding.ranks import rank_consistency
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.domain.errors import CallProblem
from shardcore.domain.layouts.layout import Layout
from shardcore.reporting.inspection.verification import VariableCheck, Verification


def verify_model(model: keras.Model, batch: object, sessions: Sessions) -> Verification:
    """Compares the variables of a model and its optimizer with their layouts. A collective."""
    session = sessions.required()
    session.processes.barrier(f"verify() of model {model.name!r}")
    adoption.adopt(model, session)
    if batch is not None:
        with session.strategy.implicit_replication():
            _backward(model, batch, session)
    report = rules_report.rules_report(model, session)
    checks = tuple(_check(variable, session) for variable in rank_consistency.variables_of(model))
    return Verification(
        mesh=str(session.mesh),
        strategy=sessions.entry.name,
        rank=session.processes.rank,
        variables=checks,
        unused_rules=report.unused_rules if report else (),
    )


def _backward(model: keras.Model, batch: object, session: Session) -> None:
    """Computes the gradients of one batch, and restores the state that a forward pass updates."""
    if model.loss is None and keras_private.is_own_step(model, "train_step"):
        raise CallProblem(
            f"verify(batch) computes the gradients of the loss of compile(), and model "
            f"{model.name!r} has none, but an own train_step: train one step, and then call "
            "verify(model), which checks the gradients of that step.",
            name=model.name,
        )
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batches.distribute(batch, session))
    state = [(v, tensor_of(v).detach().clone()) for v in model.non_trainable_variables]
    buffers = [(buffer, buffer.clone()) for buffer in torch_modules.buffers(model)]
    model.zero_grad()
    predictions = model(x, training=True)
    loss = model.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight)
    loss.backward()
    for variable, value in state:
        variable.assign(value)
    for buffer, value in buffers:
        buffer.copy_(value)


def _check(variable: keras.Variable, session: Session) -> VariableCheck:
    storage, strategy = storage_of(variable), session.strategy
    layout = storage.layout
    assert layout is not None, f"{variable.path} was adopted"
    with torch.no_grad():
        local, full = (
            strategy.to_local(tensor_of(variable)),
            strategy.full_tensor(tensor_of(variable)),
        )
        own = layout.slices(full.shape, session.world.position)
        bytes_here = local.untyped_storage().nbytes()
        stored = torch.equal(local, full[own]) and bytes_here <= local.nbytes
        gradient, fits = tensor_of(variable).grad, None
        if gradient is not None:
            gradient = strategy.layout(gradient) or Layout.replicated(session.mesh, gradient.ndim)
            same_part = gradient.slices(full.shape, session.world.position) == own
            fits = same_part and not gradient.partial
        value = rank_consistency.digest(full)
    everyone = session.processes.gather((stored, value, fits))
    all_fit = [fits_there for _, _, fits_there in everyone]
    return VariableCheck(
        path=variable.path,
        rule=storage.rule_key,
        spec=str(layout),
        shape=tuple(variable.shape),
        local_shape=tuple(local.shape),
        bytes_here=bytes_here,
        bytes_full=full.nbytes,
        stored=all(facts[:2] == (True, value) for facts in everyone),
        gradient=None if gradient is None else str(gradient),
        gradient_fits=None if None in all_fit else all(all_fit),
        stale=rules_report.stale_rule(variable, session),
    )
