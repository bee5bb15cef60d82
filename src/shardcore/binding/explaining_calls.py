"""The layers that a step calls, and what Keras is at when a tensor is moved."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import attrs

from shardcore.binding import seams
from shardcore.binding.session import Session
from shardcore.binding.variable import storage_layout
from shardcore.domain.errors import LayoutError
from shardcore.domain.explanation.collectives import ExplainedLayer, ExplainedVariable
from shardcore.domain.explanation.reasons import Cause
from shardcore.ports.whereabouts import Witness


@attrs.define(eq=False)
class _Called:
    """A layer that was called."""

    layer: Any
    depth: int
    inner: list["_Called"] = attrs.field(factory=list)
    calls: int = 0
    output: Any = None


@attrs.define(eq=False)
class Calls:
    """Follows the calls of layers, and hands them to the witness."""

    session: Session | None
    witness: Witness
    cause: Cause | None = attrs.field(default=None, init=False)
    _called: dict[int, _Called] = attrs.field(factory=dict, init=False)
    _open: list[_Called] = attrs.field(factory=list, init=False)
    _owners: dict[str, str] = attrs.field(factory=dict, init=False)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Calls, outputs, assignments and readings are followed inside."""
        rebinding = seams.Rebinding()
        try:
            rebinding.replace(seams.SEAMS["layer call"], seams.around(self._layer_call))
            rebinding.replace(seams.SEAMS["layer edges"], self._edges)
            rebinding.replace(seams.SEAMS["variable assign"], seams.around(self._assign))
            rebinding.replace(seams.SEAMS["convert_to_numpy"], seams.around(self._to_numpy))
            yield
        finally:
            rebinding.restore()

    @contextmanager
    def because(self, cause: Cause) -> Iterator[None]:
        """What is moved inside is moved for `cause`."""
        before, self.cause = self.cause, cause
        try:
            yield
        finally:
            self.cause = before

    def _layer_call(
        self, original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if seams.is_symbolic():
            return original(layer, *args, **kwargs)
        with self._inside(layer) as called:
            outputs = original(layer, *args, **kwargs)
            called.output = self._output(outputs)
            return outputs

    @contextmanager
    def _inside(self, layer: Any) -> Iterator[_Called]:
        called = self._called.get(id(layer))
        if called is None:
            called = self._called[id(layer)] = _Called(layer, len(self._open))
            if self._open:
                self._open[-1].inner.append(called)
        called.calls += 1
        self._open.append(called)
        try:
            with self.witness.inside(_path(layer)):
                yield called
        finally:
            self._open.pop()

    def _edges(self, edges: Any) -> Any:
        """Stands in for `LayerEdges`: notes the output that is laid out, or the rule for it."""

        def distribute_tensor(outputs: Any, path: str) -> Any:
            rule = self.session.rule(path) if self.session else None
            with self.because(Cause("output", path) if rule is None else Cause("rule", rule.key)):
                return edges.distribute_tensor(outputs, path)

        return SimpleNamespace(distribution=edges.distribution, distribute_tensor=distribute_tensor)

    def _assign(self, original: Callable[..., None], variable: Any, value: Any) -> None:
        with self.because(Cause("assign", variable.path)):
            original(variable, value)

    def _to_numpy(self, original: Callable[..., Any], x: Any) -> Any:
        with self.because(Cause("numpy")):
            return original(x)

    def _output(self, outputs: Any) -> Any:
        """The shape of the first output, and its layout if it has one."""
        found: list[Any] = []
        seams.map_tensors(found.append, outputs)
        if not found:
            return None
        layout = None
        if self.session is not None:
            try:
                layout = self.session.strategy.layout(found[0])
            except LayoutError:  # laid out as a reshape has left it
                layout = None
        return tuple(found[0].shape), None if layout is None else layout.spec

    def owner(self, paths: Sequence[str]) -> str:
        """The layer that has the one variable of `paths`; empty if there are several."""
        if not self._owners:  # in the backward pass every layer has been called
            self._owners = {v.path: each.path for each in self.layers() for v in each.variables}
        return self._owners.get(paths[0], "") if len(paths) == 1 else ""

    def layers(self) -> tuple[ExplainedLayer, ...]:
        """What is known of each layer, in the order of the first calls."""
        return tuple(_explained(each) for each in self._called.values())


def _path(layer: Any) -> str:
    return str(layer.path or layer.name)


def _explained(called: _Called) -> ExplainedLayer:
    inner = {id(v) for each in called.inner for v in each.layer.variables}
    own = [v for v in called.layer.variables if id(v) not in inner and not seams.is_seed(v)]
    shape, spec = called.output or (None, None)
    return ExplainedLayer(
        _path(called.layer),
        type(called.layer).__name__,
        called.depth,
        called.calls,
        tuple(_variable(each) for each in own if each._value is not None),
        shape,
        spec,
    )


def _variable(variable: Any) -> ExplainedVariable:
    layout, shape = storage_layout(variable), tuple(variable.shape)
    spec = (None,) * len(shape) if layout is None else layout.spec
    return ExplainedVariable(variable.path, shape, variable._value.element_size(), spec=spec)
