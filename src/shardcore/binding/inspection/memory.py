"""The function behind `shardcore plan --memory`: a train step on tensors without values."""

import math
from collections.abc import Callable
from typing import Any

import torch
from keras import Model

from shardcore.binding import keras_private
from shardcore.binding.checkpoints.state import StateTensor, tensors_of
from shardcore.binding.context.session import Session, Sessions
from shardcore.binding.data import batches
from shardcore.binding.inspection.explain import checked_batch
from shardcore.domain.checkpoints.division import divide, pieces
from shardcore.domain.errors import PolicyError, ShardcoreError
from shardcore.domain.memory import highest
from shardcore.ports.memory import MemoryTracer
from shardcore.reporting.memory import MemoryReport


def estimate_memory(
    build: Callable[[], Model],
    batch: Callable[[], Any],
    policy: str,
    sessions: Sessions,
    tracer: MemoryTracer[torch.Tensor],
) -> MemoryReport:
    """Returns the memory that a rank takes in a train step, which runs without values.

    Args:
        build: Returns the compiled model.
        batch: Returns the global batch.
        policy: The policy that laid the model out, for the title.
        sessions: The distribution that is set.
        tracer: Notes what is allocated.

    Raises:
        PolicyError: If the model or its step fails without values.
        StrategyError: If the model is not compiled, or the batch is none.
    """
    with tracer.without_values(), keras_private.drawing_without_values():
        try:
            with sessions.ignoring_distributions():
                model = build()
            data = checked_batch(model, batch(), "train")
            session = sessions.required()
            with sessions.scope_of(model), session.strategy.scope():
                state = _run(model, data, session, sessions, tracer)
        except ShardcoreError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            raise PolicyError(
                "To see how much memory the step takes, it runs on tensors without values, and "
                f"there it failed ({type(error).__name__}: {error}). If it reads values: compute "
                "with keras.ops, and load weights outside the function that builds the model. If "
                "it reads none, it fails in fit() too."
            ) from error
    return MemoryReport(
        policy,
        str(session.mesh),
        model.name,
        highest(tracer.allocations()),
        _copied(state, session),
    )


def _run(
    model: Model,
    data: Any,
    session: Session,
    sessions: Sessions,
    tracer: MemoryTracer[torch.Tensor],
) -> list[StateTensor]:
    """Runs the step as `train_on_batch` does, eagerly; returns the tensors that the model keeps."""
    keras_private.build_by(model, data)
    state = tensors_of(model, session)
    for each in state:
        tracer.hold(each.local, "optimizer" if each.group == "optimizer" else "variables")
    (data,) = batches.distribute_step([data], session)
    data = keras_private.map_tensors(lambda each: _rows(each, session, tracer), data)
    model.reset_metrics()
    with sessions.working(model), tracer.tracing():
        with sessions.sums.step():
            outputs = model.train_step(data)
        keras_private.map_tensors(session.strategy.full_tensor, outputs)
        for variable in model.trainable_variables:
            gradient = keras_private.gradient_of(variable)
            if gradient is not None:
                tracer.hold(_local(gradient, session), "gradients")
    return state


def _rows(
    tensor: torch.Tensor, session: Session, tracer: MemoryTracer[torch.Tensor]
) -> torch.Tensor:
    """Returns this rank's part of the batch without the rest, as `fit` reads it from arrays."""
    layout = session.strategy.layout(tensor)
    rows = _local(tensor, session).clone()
    tracer.hold(rows, "batch")
    return rows if layout is None else session.strategy.join(rows, layout, tuple(tensor.shape))


def _local(tensor: torch.Tensor, session: Session) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = session.strategy.local(tensor)
    return found


def _copied(state: list[StateTensor], session: Session) -> int:
    """Returns the bytes that the first rank copies to write its part of a sharded checkpoint."""
    variables = divide(each.to_store() for each in state)
    layouts = (each.layout for each in state)
    mine = pieces(zip(variables, layouts, strict=True), session.world.position)
    sizes = {each.name: each.local.element_size() for each in state}
    return sum(math.prod(each.local.shape) * sizes[each.variable] for each in mine)
