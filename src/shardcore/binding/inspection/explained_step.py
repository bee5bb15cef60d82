"""The explained step: notes the layers that it calls and the collectives that it starts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from keras import Layer, Model, Variable

from shardcore.binding import keras_private
from shardcore.binding.data import batches
from shardcore.binding.keras_private.patches import replaces, replaces_value
from shardcore.binding.keras_private.variables import storage_of, tensor_of
from shardcore.binding.metric_sums import MetricSums
from shardcore.binding.ranks import rank_consistency
from shardcore.binding.ranks.session import Session
from shardcore.binding.types import Original
from shardcore.domain.cost.collectives import ExplainedLayer, Phase, axes_of
from shardcore.domain.cost.reasons import CollectiveFacts
from shardcore.domain.errors import LayoutError
from shardcore.domain.layouts.variable_size import ShardedVariable
from shardcore.ports.measurement import CollectiveTracer, TracerFactory


@attrs.define(eq=False)
class _Called:
    """A layer that was called."""

    layer: Layer
    depth: int
    inner: list["_Called"] = attrs.field(factory=list)
    calls: int = 0
    output: Any = None


@attrs.define(eq=False)
class ExplainedStep:
    """Runs a step, and notes the layers that it calls and the collectives that it starts."""

    model: Model
    step: str
    session: Session | None
    facts: list[CollectiveFacts] = attrs.field(factory=list, init=False)
    _in_batch: bool = attrs.field(default=True, init=False)
    # The current reason in Keras for a collective, and the rule behind it.
    _cause: tuple[str, str] = attrs.field(default=("", ""), init=False)
    _called: dict[int, _Called] = attrs.field(factory=dict, init=False)
    _open: list[_Called] = attrs.field(factory=list, init=False)
    _owners: dict[str, str] = attrs.field(factory=dict, init=False)

    def run(self, data: object, trace: TracerFactory, sums: MetricSums) -> None:
        """Runs the step eagerly, as `train_on_batch` and the like do."""
        session = self.session
        tracer = trace(
            self._note_collective,
            {v.path: tensor_of(v) for v in rank_consistency.variables_of(self.model)},
        )
        with tracer.tracing(), self._follow(tracer):
            if session is None:
                data = keras_private.map_leaves(batches.as_tensor, data)
            else:
                (data,) = batches.distribute_step([data], session)
            self._in_batch = False
            if self.step != "predict":
                self.model.reset_metrics()
            with sums.step():
                outputs = getattr(self.model, f"{self.step}_step")(data)
            if session is not None:
                with self._because("what the step returns:"):
                    keras_private.map_tensors(session.strategy.full_tensor, outputs)

    def layers(self) -> tuple[ExplainedLayer, ...]:
        """Describes each layer that was called, in the order of first calls."""
        return tuple(map(_explain_layer, self._called.values()))

    def _note_collective(self, facts: CollectiveFacts) -> None:
        session = self.session  # without one, an overridden step may still communicate
        self.facts.append(
            attrs.evolve(
                facts,
                phase=self._phase(facts),
                axes=axes_of(session.mesh, session.world.processes, facts.processes)
                if session
                else (),
                layer=facts.layer or self._owner(facts.reduced),
                cause=self._cause[0],
                rule=self._cause[1],
                batch_axes=session.batch_axes if session else (),
            )
        )

    def _phase(self, facts: CollectiveFacts) -> Phase:
        if self._in_batch:
            return "batch"
        if facts.phase == "backward":
            return "backward"
        if keras_private.is_made_by_optimizer():
            return "update"
        return "forward" if facts.layer else "loss and metrics"

    def _owner(self, paths: Sequence[str]) -> str:
        """Finds the layer that has the one variable of `paths`; empty if there are several."""
        if not self._owners:  # in the backward pass every layer has been called
            self._owners = {v.path: layer.path for layer in self.layers() for v in layer.variables}
        return self._owners.get(paths[0], "") if len(paths) == 1 else ""

    @contextmanager
    def _follow(self, tracer: CollectiveTracer) -> Iterator[None]:
        def layer_call(original: Original, layer: Layer, *args: object, **kwargs: object) -> Any:
            if keras_private.is_symbolic():
                return original(layer, *args, **kwargs)
            called = self._called.setdefault(id(layer), _Called(layer, len(self._open)))
            if not called.calls and self._open:
                self._open[-1].inner.append(called)
            called.calls += 1
            self._open.append(called)
            try:
                with tracer.layer(_path(layer)):
                    outputs = original(layer, *args, **kwargs)
                    called.output = self._output(outputs)
                    return outputs
            finally:
                self._open.pop()

        with (
            keras_private.wrap_layer_calls(layer_call),
            keras_private.replaced(self.edges, self.assign, self.to_numpy),
        ):
            yield

    @replaces_value(
        "keras.src.layers.layer:distribution_lib",
        reason="Lays out the output of a layer, maybe by a rule.",
    )
    def edges(self, original: Any) -> Any:
        """Replaces `LayerEdges`: notes the output that is laid out, and its rule."""

        def distribute_tensor(outputs: object, path: str) -> Any:
            rule = self.session.rule(path) if self.session else None
            asks = f" rule {rule.key!r} asks for it," if rule else ""
            with self._because(f"the layer's output:{asks}", rule.key if rule else ""):
                return original.distribute_tensor(outputs, path)

        return SimpleNamespace(
            distribution=original.distribution, distribute_tensor=distribute_tensor
        )

    @replaces(
        "keras.src.backend.torch.core:Variable._direct_assign",
        reason="Redistributes a new value.",
    )
    def assign(self, original: Original, variable: Variable, value: torch.Tensor) -> None:
        """Replaces `Variable._direct_assign`: notes the variable."""
        with self._because(f"the new value of {variable.path}:"):
            original(variable, value)

    @replaces(
        "keras.src.backend.torch.core:convert_to_numpy",
        reason="All-gathers a value.",
        everywhere=True,
    )
    def to_numpy(self, original: Original, x: object) -> Any:
        """Replaces `convert_to_numpy`: notes that NumPy reads the value."""
        with self._because("a value that NumPy reads:"):
            return original(x)

    @contextmanager
    def _because(self, cause: str, rule: str = "") -> Iterator[None]:
        before, self._cause = self._cause, (cause, rule)
        try:
            yield
        finally:
            self._cause = before

    def _output(self, outputs: object) -> Any:
        """Describes the first output: shape, spec (None if unknown) and bytes of an element."""
        tensors: list[Any] = []
        keras_private.map_tensors(tensors.append, outputs)
        if not tensors:
            return None
        try:
            layout = self.session and self.session.strategy.layout(tensors[0])
        except LayoutError:  # a strided shard, as after a reshape
            layout = None
        return tuple(tensors[0].shape), layout and layout.spec, tensors[0].element_size()


def _path(layer: Layer) -> str:
    return str(layer.path or layer.name)


def sharded_variable(variable: Variable) -> ShardedVariable:
    """Describes a variable, and the layout in which it is stored."""
    layout, shape = storage_of(variable).layout, tuple(variable.shape)
    spec = (None,) * len(shape) if layout is None else layout.spec
    return ShardedVariable(variable.path, shape, spec, tensor_of(variable).element_size())


def _explain_layer(called: _Called) -> ExplainedLayer:
    inner = {id(v) for child in called.inner for v in child.layer.variables}
    own = [v for v in called.layer.variables if id(v) not in inner and not keras_private.is_seed(v)]
    variables = [sharded_variable(variable) for variable in own if tensor_of(variable) is not None]
    return ExplainedLayer(
        _path(called.layer),
        type(called.layer).__name__,
        called.depth,
        called.calls,
        tuple(variables),
        *(called.output or (None, None)),
    )
