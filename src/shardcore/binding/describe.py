"""What policies are told of a Keras model."""

from collections.abc import Iterable
from typing import Any

import keras

from shardcore.ports.model import LayerFacts, VariableFacts

CONFIG = ("activation", "axis", "data_format", "groups", "equation")


def describe(model: Any) -> LayerFacts:
    """The facts of a built model."""
    return _Describer().layer(model)


class _Describer:
    """Tells every layer and every variable once, where it is met first."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def layer(self, layer: Any) -> LayerFacts:
        """`layer` and all below it."""
        if id(layer) in self._told:
            return LayerFacts(layer.name, ("SharedLayer",))
        self._told.add(id(layer))
        graph = _graph(layer)
        operations = [] if graph is None else graph.operations
        others = [each for each in getattr(layer, "_layers", ()) if id(each) not in self._told]
        children = {id(each): each for each in (*operations, *others) if each is not graph}
        told = tuple(self.layer(each) for each in children.values())
        return LayerFacts(
            layer.name,
            _kinds(layer),
            _config(layer),
            self._variables(getattr(layer, "variables", ())),
            told,
            None if graph is None else _feeds(graph),
            ()
            if graph is None
            else tuple(each._keras_history.operation.name for each in graph.outputs),
            getattr(layer, "path", None) or "",
            _input_shape(layer),
        )

    def _variables(self, variables: Iterable[Any]) -> tuple[VariableFacts, ...]:
        """Those that no child has told."""
        new = [each for each in variables if id(each) not in self._told]
        self._told |= {id(each) for each in new}
        return tuple(_variable(each) for each in new)


def _variable(variable: Any) -> VariableFacts:
    shape, itemsize = tuple(variable.shape), variable._value.element_size()
    return VariableFacts(variable.path, shape, itemsize, bool(variable.trainable))


def _input_shape(layer: Any) -> tuple[int | None, ...] | None:
    """The one shape that `layer` was built with, None if that is not known."""
    built = layer.get_build_config() if isinstance(layer, keras.layers.Layer) else None
    shape = (built or {}).get("input_shape")
    is_shape = isinstance(shape, tuple) and all(size is None or type(size) is int for size in shape)
    return shape if is_shape else None


def _graph(layer: Any) -> Any:
    """The functional model that says how the layers of `layer` are connected, None without one."""
    if isinstance(layer, keras.Sequential):
        return layer._functional
    return layer if isinstance(layer, keras.Function) else None


def _feeds(graph: Any) -> tuple[tuple[str, str], ...]:
    nodes = (
        node for depth in sorted(graph._nodes_by_depth) for node in graph._nodes_by_depth[depth]
    )
    inside = set(map(id, graph.operations))
    pairs = (
        (parent.operation.name, node.operation.name)
        for node in nodes
        for parent in node.parent_nodes
        if id(parent.operation) in inside
    )
    return tuple(dict.fromkeys(pairs))


def _kinds(layer: Any) -> tuple[str, ...]:
    """The names of its classes below Keras' `Layer`, or `Operation`."""
    bases = set(keras.layers.Layer.__mro__)
    return tuple(each.__name__ for each in type(layer).__mro__ if each not in bases) or ("Layer",)


def _config(layer: Any) -> dict[str, Any]:
    found = {name: getattr(layer, name) for name in CONFIG if hasattr(layer, name)}
    if callable(found.get("activation")):
        activation = found["activation"]
        found["activation"] = getattr(activation, "__name__", type(activation).__name__)
    ndim = getattr(getattr(layer, "input_spec", None), "ndim", None)
    axis = found.get("axis")
    if isinstance(axis, int) and axis >= 0 and ndim is not None:
        found["axis"] = axis - ndim
    return {name: value for name, value in found.items() if value is not None}
