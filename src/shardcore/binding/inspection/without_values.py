"""A train step that runs on tensors without values, while tracers watch it (ADR 39).

`shardcore plan --memory` estimates by it the memory of a rank.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import torch
from keras import Model, Variable

from shardcore.binding import keras_private
from shardcore.binding.checkpoints.state import StateTensor, tensors_of
from shardcore.binding.data import batches
from shardcore.binding.engine import adoption
from shardcore.binding.inspection.explain import checked_batch
from shardcore.binding.ranks import rank_consistency
from shardcore.binding.ranks.ambient import ignoring_distributions
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.domain.checkpoints.contents import divide, pieces_of_rank
from shardcore.domain.cost.events import highest
from shardcore.domain.errors import EnvironmentProblem, PolicyError, ShardcoreError, describe_error
from shardcore.ports.measurement import MemoryTracer
from shardcore.reporting.cost.plan import MemoryReport

# torch 2.10 to 2.15 says so, and has no name by which to ask before.
_OF_A_FORK = "autograd's threading in combination with fork"

# Opens the context of the step, for the built model.
Watch = Callable[[Model, Session], AbstractContextManager[Any]]


@attrs.frozen(eq=False)
class BuiltModel:
    """A built and compiled model whose tensors have no values.

    Args:
        model: The model.
        batch: The global batch of its step, as `checked_batch` returns it.
    """

    model: Model
    batch: Any


@attrs.frozen(eq=False)
class RunStep:
    """A step that has run.

    Args:
        model: The model.
        session: The distribution.
        state: The tensors that the model keeps, each with the number of its allocation.
        gradients: The gradients of variables, with the numbers of their allocations.
    """

    model: Model
    session: Session
    state: tuple[tuple[StateTensor, int], ...]
    gradients: tuple[tuple[Variable, int], ...]


def build_model(
    build: Callable[[], Model],
    batch: Callable[[], object],
    tracer: MemoryTracer[torch.Tensor],
) -> BuiltModel:
    """Builds a compiled model, its optimizer and its metrics, under the distribution if one is set.

    Args:
        build: Returns the compiled model.
        batch: Returns the global batch.
        tracer: Opens the context without values.

    Raises:
        EnvironmentProblem: If torch runs no backward pass in this process, a fork.
        PolicyError: If the model fails without values.
        ArgumentProblem: If the model or the batch is none.
        CallProblem: If the model is not compiled.
    """
    with _without_values(tracer):
        with ignoring_distributions(value=True):
            model = build()
        built = BuiltModel(model, checked_batch(model, batch(), "train"))
        keras_private.build_by(model, built.batch)
        return built


def run_step(
    built: BuiltModel,
    sessions: Sessions,
    tracer: MemoryTracer[torch.Tensor],
    watch: Watch = lambda model, session: nullcontext(),
) -> RunStep:
    """Runs one train step as `train_on_batch` does, eagerly.

    Args:
        built: The model and the batch. What was made before the distribution is laid out.
        sessions: The distribution that is set.
        tracer: Notes what is allocated; it opened the context in which the model was built.
        watch: Opens a context for the step alone.

    Raises:
        EnvironmentProblem: If torch runs no backward pass in this process, a fork.
        PolicyError: If the step fails without values.
    """
    with _without_values(tracer):
        strategy = sessions.required().strategy
        with sessions.scope_of(built.model), strategy.implicit_replication():
            return _run(built, sessions, tracer, watch)


def estimate_memory(
    build: Callable[[], Model],
    batch: Callable[[], object],
    policy: str,
    sessions: Sessions,
    tracer: MemoryTracer[torch.Tensor],
) -> MemoryReport:
    """Estimates the memory of a rank in a train step, by a run of it without values.

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
    ran = run_step(build_model(build, batch, tracer), sessions, tracer)
    return MemoryReport(
        policy,
        str(ran.session.mesh),
        ran.model.name,
        highest(tracer.allocations()),
        _bytes_copied([tensor for tensor, _ in ran.state], ran.session),
    )


@contextmanager
def _without_values(tracer: MemoryTracer[torch.Tensor]) -> Iterator[None]:
    """Opens the context without values, whose errors say so."""
    with tracer.without_values(), keras_private.drawing_without_values():
        try:
            yield
        except ShardcoreError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            if _OF_A_FORK in str(error):
                raise EnvironmentProblem(
                    "The step runs in a fork of this process, which has run a backward pass "
                    "already. In it torch has started threads that do not survive a fork, as it "
                    "does on a host with a GPU; in a build for CUDA also after torch.compile on a "
                    "host without one. Ask first, or in a new process."
                ) from error
            raise PolicyError(
                "A plan and an estimate of memory run the step on tensors without values, and "
                f"there it failed ({describe_error(error)}). It may need values where fit() has "
                "them: to read a number on the host, for the shape of a result (as torch.nonzero "
                "does), to load weights. Compute with keras.ops, give sizes as numbers, and load "
                "weights outside the function that builds the model."
            ) from error


def _run(
    built: BuiltModel, sessions: Sessions, tracer: MemoryTracer[torch.Tensor], watch: Watch
) -> RunStep:
    model, session = built.model, sessions.required()
    variables = rank_consistency.variables_of(model)
    made_before = [v for v in variables if keras_private.storage_of(v).layout is None]
    adoption.store_variables(made_before, session, model)
    state = tuple(
        (
            tensor,
            tracer.hold(tensor.local, "optimizer" if tensor.group == "optimizer" else "variables"),
        )
        for tensor in tensors_of(model, session)
    )
    (data,) = batches.distribute_step([built.batch], session)
    data = keras_private.map_tensors(lambda tensor: _rows(tensor, session, tracer), data)
    model.reset_metrics()
    with sessions.working(model), watch(model, session), tracer.tracing():
        with sessions.sums.step():
            outputs = model.train_step(data)
        keras_private.map_tensors(session.strategy.full_tensor, outputs)
        gradients = tuple(_gradients(model, session, tracer))
    return RunStep(model, session, state, gradients)


def _gradients(
    model: Model, session: Session, tracer: MemoryTracer[torch.Tensor]
) -> Iterator[tuple[Variable, int]]:
    for variable in model.trainable_variables:
        gradient = keras_private.gradient_of(variable)
        if gradient is not None:
            yield variable, tracer.hold(_local(gradient, session), "gradients")


def _rows(
    tensor: torch.Tensor, session: Session, tracer: MemoryTracer[torch.Tensor]
) -> torch.Tensor:
    """Clones this rank's part of the batch without the rest, as `fit` reads it from arrays."""
    layout = session.strategy.layout(tensor)
    rows = _local(tensor, session).clone()
    tracer.hold(rows, "batch")
    return (
        rows if layout is None else session.strategy.from_local(rows, layout, tuple(tensor.shape))
    )


def _local(tensor: torch.Tensor, session: Session) -> torch.Tensor:
    with torch.no_grad():
        local: torch.Tensor = session.strategy.to_local(tensor)
    return local


def _bytes_copied(state: Sequence[StateTensor], session: Session) -> int:
    """Sums the bytes that the first rank copies to write its part of a sharded checkpoint."""
    variables = divide(tensor.to_store() for tensor in state)
    layouts = (tensor.layout for tensor in state)
    own_pieces = pieces_of_rank(zip(variables, layouts, strict=True), session.world.position)
    sizes = {tensor.name: tensor.local.element_size() for tensor in state}
    return sum(math.prod(piece.local.shape) * sizes[piece.variable] for piece in own_pieces)
