"""A train step that runs on tensors without values, while tracers watch it (ADR 39)."""

from collections.abc import Callable, Iterator
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
from shardcore.domain.errors import EnvironmentProblem, PolicyError, ShardcoreError, describe_error
from shardcore.ports.measurement import MemoryTracer

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
class ReadyStep:
    """A step that can run.

    Args:
        model: The model, whose variables are laid out.
        session: The distribution.
        state: The tensors that the model keeps, each with the number of its allocation.
        data: The distributed batch.
    """

    model: Model
    session: Session
    state: tuple[tuple[StateTensor, int], ...]
    data: Any


@attrs.frozen(eq=False)
class RunStep:
    """A step that has run.

    Args:
        step: The step.
        gradients: The gradients of variables, with the numbers of their allocations.
    """

    step: ReadyStep
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
    watch: Watch,
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
    with step_scope(built, sessions, tracer):
        ready = prepare(built, sessions, tracer)
        return RunStep(ready, run(ready, sessions, tracer, watch))


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


@contextmanager
def step_scope(
    built: BuiltModel, sessions: Sessions, tracer: MemoryTracer[torch.Tensor]
) -> Iterator[None]:
    """Opens the context of a step without values, under the distribution that is set."""
    with _without_values(tracer):
        strategy = sessions.required().strategy
        with sessions.scope_of(built.model), strategy.implicit_replication():
            yield


def prepare(built: BuiltModel, sessions: Sessions, tracer: MemoryTracer[torch.Tensor]) -> ReadyStep:
    """Lays out the model and its batch; notes what they take."""
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
    return ReadyStep(model, session, state, data)


def run(
    ready: ReadyStep,
    sessions: Sessions,
    tracer: MemoryTracer[torch.Tensor],
    watch: Watch = lambda model, session: nullcontext(),
) -> tuple[tuple[Variable, int], ...]:
    """Runs a step that tracers watch; returns the gradients by the numbers of their allocations."""
    model, session = ready.model, ready.session
    with sessions.working(model), watch(model, session), tracer.tracing():
        train(ready, sessions)
        return tuple(_gradients(model, session, tracer))


def train(ready: ReadyStep, sessions: Sessions) -> Any:
    """Runs a step as `train_on_batch` does."""
    with sessions.sums.step():
        outputs = ready.model.train_step(ready.data)
    return keras_private.map_tensors(ready.session.strategy.full_tensor, outputs)


def _gradients(
    model: Model, session: Session, tracer: MemoryTracer[torch.Tensor]
) -> Iterator[tuple[Variable, int]]:
    for variable in model.trainable_variables:
        gradient = keras_private.gradient_of(variable)
        if gradient is not None:
            yield variable, tracer.hold(local(gradient, session), "gradients")


def _rows(
    tensor: torch.Tensor, session: Session, tracer: MemoryTracer[torch.Tensor]
) -> torch.Tensor:
    """Clones this rank's part of the batch without the rest, as `fit` reads it from arrays."""
    layout = session.strategy.layout(tensor)
    rows = local(tensor, session).clone()
    tracer.hold(rows, "batch")
    return (
        rows if layout is None else session.strategy.from_local(rows, layout, tuple(tensor.shape))
    )


def local(tensor: torch.Tensor, session: Session) -> torch.Tensor:
    """Takes the local shard of a tensor."""
    with torch.no_grad():
        shard: torch.Tensor = session.strategy.to_local(tensor)
    return shard
