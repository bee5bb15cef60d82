"""The memory of a rank in a train step, from a run of it without values (ADR 39).

`shardcore plan --memory` shows it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import attrs
import torch
from keras import Model

from shardcore.binding import keras_private
from shardcore.binding.capture.large_steps import is_large
from shardcore.binding.capture.local_tensors import local_tensors
from shardcore.binding.capture.step import CapturedStep
from shardcore.binding.checkpoints.state import StateTensor
from shardcore.binding.inspection.without_values import (
    ReadyStep,
    build_model,
    local,
    prepare,
    run,
    step_scope,
    train,
)
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.domain.capture import NotCaptured
from shardcore.domain.checkpoints.contents import divide, pieces_of_rank
from shardcore.domain.cost.events import Allocation, highest
from shardcore.ports.capture import StepCapture
from shardcore.ports.measurement import MemoryTracer
from shardcore.reporting.cost.plan import MemoryReport


def estimate_memory(
    build: Callable[[], Model],
    batch: Callable[[], object],
    policy: str,
    sessions: Sessions,
    tracer: MemoryTracer[torch.Tensor],
    capture: StepCapture[torch.Tensor],
) -> MemoryReport:
    """Estimates the memory of a rank in a train step, by a run of it without values.

    The step is an eager one, or the program by which `fit` runs a step with large outputs.

    Args:
        build: Returns the compiled model.
        batch: Returns the global batch.
        policy: The policy that laid the model out, for the title.
        sessions: The distribution that is set.
        tracer: Notes what is allocated.
        capture: Makes the programs of steps.

    Raises:
        PolicyError: If the model or its step fails without values.
        ArgumentProblem: If the model or the batch is none.
        CallProblem: If the model is not compiled.
    """
    built = build_model(build, batch, tracer)
    with step_scope(built, sessions, tracer):
        ready = prepare(built, sessions, tracer)
        allocations = _allocations_of_program(ready, sessions, tracer, capture)
        in_slices = allocations is not None
        if allocations is None:
            run(ready, sessions, tracer)
            allocations = tracer.allocations()
    return MemoryReport(
        policy,
        str(ready.session.mesh),
        ready.model.name,
        highest(allocations),
        _bytes_copied([tensor for tensor, _ in ready.state], ready.session),
        in_slices,
    )


def _allocations_of_program(
    ready: ReadyStep,
    sessions: Sessions,
    tracer: MemoryTracer[torch.Tensor],
    capture: StepCapture[torch.Tensor],
) -> Sequence[Allocation] | None:
    """Lists what a step with large outputs allocates in `fit`, which runs it by a program.

    None for a step that `fit` runs eagerly at first.
    """
    model, session = ready.model, ready.session
    captured = CapturedStep(model, "train_step", capture)
    is_captured = isinstance(model.jit_compile, keras_private.Auto) and not model.run_eagerly
    if not is_captured or not is_large(captured, ready.data, session):
        return None

    def gradients() -> Iterator[torch.Tensor]:
        for variable in model.trainable_variables:
            gradient = keras_private.gradient_of(variable)
            if gradient is not None:
                yield local(gradient, session)

    held = [attrs.evolve(allocation, begin=0) for allocation in tracer.allocations()]
    try:
        with sessions.working(model):
            made = capture.allocations(
                partial(train, ready, sessions),
                local_tensors(ready.data, session),
                gradients,
                tracer.without_values(),
            )
    except NotCaptured:
        return None  # `fit` runs it with its outputs whole, and says why
    finally:
        model.zero_grad()
    return [*held, *made]


def _bytes_copied(state: Sequence[StateTensor], session: Session) -> int:
    """Sums the bytes that the first rank copies to write its part of a sharded checkpoint."""
    variables = divide(tensor.to_store() for tensor in state)
    layouts = (tensor.layout for tensor in state)
    own_pieces = pieces_of_rank(zip(variables, layouts, strict=True), session.world.position)
    sizes = {tensor.name: tensor.local.element_size() for tensor in state}
    return sum(math.prod(piece.local.shape) * sizes[piece.variable] for piece in own_pieces)
