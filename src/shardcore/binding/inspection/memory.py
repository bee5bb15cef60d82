"""The function behind `shardcore plan --memory`: the memory of a train step without values."""

import math
from collections.abc import Callable, Sequence

import torch
from keras import Model

from shardcore.binding.checkpoints.state import StateTensor
from shardcore.binding.inspection.without_values import build_model, run_step
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.domain.checkpoints.contents import divide, pieces_of_rank
from shardcore.domain.cost.events import highest
from shardcore.ports.measurement import MemoryTracer
from shardcore.reporting.cost.plan import MemoryReport


def estimate_memory(
    build: Callable[[], Model],
    batch: Callable[[], object],
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
        ArgumentProblem: If the model or the batch is none.
        CallProblem: If the model is not compiled.
    """
    ran = run_step(build_model(build, batch, sessions, tracer), sessions, tracer)
    return MemoryReport(
        policy,
        str(ran.session.mesh),
        ran.model.name,
        highest(tracer.allocations()),
        _bytes_copied([tensor for tensor, _ in ran.state], ran.session),
    )


def _bytes_copied(state: Sequence[StateTensor], session: Session) -> int:
    """Returns the bytes that the first rank copies to write its part of a sharded checkpoint."""
    variables = divide(tensor.to_store() for tensor in state)
    layouts = (tensor.layout for tensor in state)
    own_pieces = pieces_of_rank(zip(variables, layouts, strict=True), session.world.position)
    sizes = {tensor.name: tensor.local.element_size() for tensor in state}
    return sum(math.prod(piece.local.shape) * sizes[piece.variable] for piece in own_pieces)
