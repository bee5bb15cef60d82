"""The trace of a train step without values, from which its cost follows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import keras
import numpy as np
import torch

from shardcore.binding.checkpoints.state import StateTensor
from shardcore.binding.context import rank_consistency
from shardcore.binding.context.session import Session, Sessions, stored_layout
from shardcore.binding.inspection.without_values import RunStep, run_step
from shardcore.binding.keras_private.variables import tensor_of
from shardcore.domain.errors import PolicyError
from shardcore.domain.explanation.collectives import axes_of
from shardcore.domain.explanation.reasons import Facts
from shardcore.domain.traced_step import Stored, TracedStep
from shardcore.ports.memory import MemoryTracer
from shardcore.ports.trace_context import TracerFactory
from shardcore.ports.work import WorkTracer


def trace_step(
    build: Callable[[], keras.Model],
    batch: Any,
    rows: int,
    sessions: Sessions,
    memory: MemoryTracer[torch.Tensor],
    work: WorkTracer,
    collectives: TracerFactory,
) -> TracedStep:
    """Returns the trace of a train step under the distribution that is set.

    Args:
        build: Returns the compiled model.
        batch: A batch of any number of rows.
        rows: The rows of the global batch of the trace.
        sessions: The distribution that is set.
        memory: Notes what is allocated.
        work: Notes the operators.
        collectives: Makes the tracer of collectives.

    Raises:
        PolicyError: If the model or its step fails without values.
        StrategyError: If the model is not compiled, or the batch is none.
    """
    facts: list[Facts] = []

    @contextmanager
    def watch(model: keras.Model, session: Session) -> Iterator[None]:
        def saw(fact: Facts) -> None:
            axes = axes_of(session.mesh, session.world.processes, fact.processes)
            facts.append(attrs.evolve(fact, axes=axes, processes=()))

        variables = {v.path: tensor_of(v) for v in rank_consistency.variables_of(model)}
        update = model.optimizer.apply

        def apply(*args: Any, **kwargs: Any) -> Any:
            with work.updating():
                return update(*args, **kwargs)

        model.optimizer.apply = apply  # this model is dropped after the step
        with work.tracing(), collectives(saw, variables).tracing():
            yield

    given = _with_rows(batch, rows)  # from values, which a step without them cannot read
    ran = run_step(build, lambda: given, sessions, memory, watch)
    stored = dict(_stored(ran))
    numbers = {number: at for at, number in enumerate(stored)}
    return TracedStep(
        ran.session.mesh,
        tuple(work.work()),
        tuple(facts),
        tuple((each, numbers.get(number)) for number, each in enumerate(memory.allocations())),
        tuple(stored.values()),
    )


def rows_of(batch: Any) -> int:
    """Returns the number of rows of a batch.

    Raises:
        PolicyError: If it has none.
    """
    leaves = [each for each in keras.tree.flatten(batch) if each is not None]
    shape = getattr(leaves[0], "shape", ()) if leaves else ()
    if not shape or not shape[0]:
        raise PolicyError(f"Expected a batch (x, y) of arrays or tensors with rows, got {batch!r}.")
    return int(shape[0])


def _with_rows(batch: Any, rows: int) -> Any:
    """Returns a batch of so many rows, each the first one."""

    def repeated(leaf: Any) -> Any:
        if leaf is None:
            return None
        return np.repeat(keras.ops.convert_to_numpy(leaf[:1]), rows, axis=0)

    return keras.tree.map_structure(repeated, batch)


def _stored(ran: RunStep) -> Iterator[tuple[int, Stored]]:
    """Yields the tensors of variables by the numbers of their allocations, values first."""
    for each, number in ran.state:
        yield number, _of_state(each)
    for variable, number in ran.gradients:
        layout, shape = stored_layout(variable), tuple(variable.shape)
        spec = (None,) * len(shape) if layout is None else layout.spec
        itemsize = tensor_of(variable).element_size()
        yield number, Stored(variable.path, shape, spec, itemsize)


def _of_state(each: StateTensor) -> Stored:
    return Stored(each.path, each.shape, each.layout.spec, each.local.element_size())
