"""The trace of a train step without values, from which its cost follows."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import keras
import numpy as np
import torch

from shardcore.binding import keras_private
from shardcore.binding.inspection.explained_step import sharded_variable
from shardcore.binding.inspection.without_values import BuiltModel, RunStep, build_model, run_step
from shardcore.binding.keras_private.variables import tensor_of
from shardcore.binding.ranks import rank_consistency
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.types import Original
from shardcore.domain.cost.collectives import axes_of
from shardcore.domain.cost.events import TracedStep
from shardcore.domain.cost.reasons import CollectiveFacts
from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.variable_size import ShardedVariable
from shardcore.ports.measurement import EventTracer, TracerFactory, gradients_apart_scope


@attrs.frozen
class RepeatedBlocks:
    """Repeated blocks of a model, each called on the output of the previous one (ADR 46).

    Args:
        traced: The names of those that the trace has.
        left_out: The names of the others, which return what they get.
    """

    traced: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()


def build_to_trace(
    build: Callable[[], keras.Model],
    batch: object,
    tracer: EventTracer[torch.Tensor],
    blocks: RepeatedBlocks,
) -> BuiltModel:
    """Builds a model for `trace_step`.

    Args:
        build: Returns the compiled model.
        batch: A batch of any number of rows.
        tracer: Opens the context without values.
        blocks: Blocks of the model, some of which may be left out.

    Raises:
        PolicyError: If the model fails without values.
        ArgumentProblem: If the model or the batch is none.
        CallProblem: If the model is not compiled.
    """

    def call(original: Original, layer: keras.Layer, *args: object, **kwargs: object) -> Any:
        return args[0] if layer.name in blocks.left_out else original(layer, *args, **kwargs)

    with keras_private.wrap_layer_calls(call):
        return build_model(build, lambda: batch, tracer)


def trace_step(
    built: BuiltModel,
    rows: int,
    sessions: Sessions,
    tracer: EventTracer[torch.Tensor],
    collectives: TracerFactory,
    blocks: RepeatedBlocks,
) -> TracedStep:
    """Runs a train step under the distribution that is set, and notes what it costs.

    Args:
        built: The model, and a batch of any number of rows.
        rows: The rows of the global batch of the trace.
        sessions: The distribution that is set.
        tracer: Notes what happens; it opened the context in which the model was built.
        collectives: Makes the tracer of collectives.
        blocks: Blocks of the model, as it was built.

    Raises:
        PolicyError: If the step fails without values.
    """

    @contextmanager
    def watch(model: keras.Model, session: Session) -> Iterator[None]:
        def note(fact: CollectiveFacts) -> None:
            axes = axes_of(session.mesh, session.world.processes, fact.processes)
            tracer.start(attrs.evolve(fact, axes=axes, processes=()))

        _own(model, session, tracer, blocks)
        variables = {v.path: tensor_of(v) for v in rank_consistency.variables_of(model)}
        update = model.optimizer.apply

        def apply(*args: object, **kwargs: object) -> Any:
            with tracer.updating():
                return update(*args, **kwargs)

        model.optimizer.apply = apply  # this model is dropped after the step
        with collectives(note, variables).tracing(), gradients_apart_scope(value=True):
            yield

    def call(original: Original, layer: keras.Layer, *args: object, **kwargs: object) -> Any:
        if layer.name in blocks.left_out:
            return args[0]  # a functional model calls it in its step too
        traced = layer.name in blocks.traced and not keras_private.is_symbolic()
        with tracer.block(layer.path) if traced else nullcontext():
            return original(layer, *args, **kwargs)

    resized = attrs.evolve(built, batch=_with_rows(built.batch, rows))
    with keras_private.wrap_layer_calls(call):
        ran = run_step(resized, sessions, tracer, watch)
    return tracer.events(ran.step.session.mesh, dict(_stored_tensors(ran)))


def _own(
    model: keras.Model, session: Session, tracer: EventTracer[torch.Tensor], blocks: RepeatedBlocks
) -> None:
    """Tells the tracer to which block each variable belongs, with its states of the optimizer."""
    block_of: dict[int, str] = {}
    for layer in keras_private.layers_of(model):
        if layer.name in blocks.traced:
            block_of |= {id(variable): layer.path for variable in layer.variables}
    weights = keras_private.weights_by_moment(model.optimizer, model)
    for variable in rank_consistency.variables_of(model):
        owner = weights.get(id(variable), variable)
        with torch.no_grad():
            local = session.strategy.to_local(tensor_of(variable))
        if id(owner) in block_of or math.prod(variable.shape) > 1:
            tracer.own(local, block_of.get(id(owner), ""))


def rows_of(batch: object) -> int:
    """Reads the number of rows of a batch from its first array.

    Raises:
        PolicyError: If it has none.
    """
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    shape = getattr(leaves[0], "shape", ()) if leaves else ()
    if not shape or not shape[0]:
        raise PolicyError(
            f"Expected a batch, as (x, y), of arrays or tensors with rows, got {batch!r}.",
            got=repr(batch),
        )
    return int(shape[0])


def _with_rows(batch: Any, rows: int) -> Any:
    """Repeats the first row of a batch: without values rows are equal anyway."""

    def repeat_first_row(leaf: Any) -> Any:
        if leaf is None:
            return None
        return np.repeat(keras.ops.convert_to_numpy(leaf[:1]), rows, axis=0)

    return keras.tree.map_structure(repeat_first_row, batch)


def _stored_tensors(ran: RunStep) -> Iterator[tuple[int, ShardedVariable]]:
    """Yields the tensors of variables by the numbers of their allocations, values first."""
    for tensor, number in ran.step.state:
        spec, itemsize = tensor.layout.spec, tensor.local.element_size()
        yield number, ShardedVariable(tensor.path, tensor.shape, spec, itemsize)
    for variable, number in ran.gradients:
        yield number, sharded_variable(variable)
