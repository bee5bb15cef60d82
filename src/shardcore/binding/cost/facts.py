"""Facts of a built model, which a policy gets: layers, variables, edges, runs of equal layers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import attrs
import keras
import numpy as np
import torch
from keras import KerasTensor, Layer

from shardcore.binding import keras_private
from shardcore.binding.keras_private.variables import tensor_of
from shardcore.ports.policy import LayerFacts, VariableFacts

# Keys in the configuration of a layer.
_CONFIG = ("activation", "axis", "data_format", "groups", "equation", "num_heads")
# The names of a layer, which differ between equal ones.
_NAMES = {"name", "path", "parent_path"}
# Their random seeds differ, and no operator depends on them.
_DRAW = (keras.initializers.Initializer, keras.random.SeedGenerator)
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, BuiltinFunctionType)


def describe(model: keras.Layer) -> LayerFacts:
    """Describes a built model: every layer and variable once, at its first place.

    The states of seed generators are left out: they are two numbers, and equal on all ranks.
    """
    seen: set[int] = set()

    def unseen(candidates: Iterable[object]) -> list[Any]:
        return [candidate for candidate in candidates if id(candidate) not in seen]

    def facts_of(layer: keras.Operation) -> LayerFacts:
        if id(layer) in seen:
            return LayerFacts(layer.name, ("SharedLayer",))
        seen.add(id(layer))
        graph = keras_private.graph_of(layer)
        children = [] if graph is None else list(graph.operations)
        children += [
            child for child in unseen(keras_private.children_of(layer)) if child is not graph
        ]
        below = tuple(map(facts_of, {id(child): child for child in children}.values()))
        variables = unseen(getattr(layer, "variables", ()))  # those of children are seen
        variables = [variable for variable in variables if not keras_private.is_seed(variable)]
        seen.update(map(id, variables))
        outputs = () if graph is None else graph.outputs
        return LayerFacts(
            layer.name,
            _kinds(layer),
            _config(layer),
            tuple(map(_variable, variables)),
            below,
            None if graph is None else _edges(graph),
            tuple(keras_private.producer_of(output).name for output in outputs),
            _path(layer),
            _input_shape(layer),
            () if graph is None else runs_of(graph),
        )

    return facts_of(model)


def _path(layer: keras.Operation) -> str:
    is_input = isinstance(layer, keras.layers.InputLayer)  # it has no path in Keras
    return layer.name if is_input else getattr(layer, "path", None) or ""


def _variable(variable: keras.Variable) -> VariableFacts:
    shape, itemsize = tuple(variable.shape), tensor_of(variable).element_size()
    return VariableFacts(variable.path, shape, itemsize, bool(variable.trainable))


def _input_shape(layer: keras.Operation) -> tuple[int | None, ...] | None:
    """The only shape with which `layer` was built, None if that is unknown."""
    if isinstance(layer, keras.layers.InputLayer):
        return tuple(layer.batch_shape)
    built = layer.get_build_config() if isinstance(layer, keras.layers.Layer) else None
    shape = (built or {}).get("input_shape")
    is_shape = isinstance(shape, tuple) and all(size is None or type(size) is int for size in shape)
    return shape if is_shape else None


def _edges(graph: keras.Function) -> tuple[tuple[str, str], ...]:
    inside = set(map(id, graph.operations))
    pairs = (
        (parent.operation.name, node.operation.name)
        for node in keras_private.nodes_of(graph)
        for parent in node.parent_nodes
        if id(parent.operation) in inside
    )
    return tuple(dict.fromkeys(pairs))


def _kinds(layer: keras.Operation) -> tuple[str, ...]:
    bases = set(keras.layers.Layer.__mro__)
    return tuple(kind.__name__ for kind in type(layer).__mro__ if kind not in bases) or ("Layer",)


def _config(layer: keras.Operation) -> dict[str, Any]:
    config = {name: getattr(layer, name) for name in _CONFIG if hasattr(layer, name)}
    if callable(config.get("activation")):
        activation = config["activation"]
        config["activation"] = getattr(activation, "__name__", type(activation).__name__)
    ndim = getattr(getattr(layer, "input_spec", None), "ndim", None)
    axis = config.get("axis")
    if isinstance(axis, int) and axis >= 0 and ndim is not None:
        config["axis"] = axis - ndim
    # Keras keeps a list as a TrackedList, which cannot be unpickled.
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in config.items()
        if value is not None
    }


def runs_of(graph: keras.Function) -> tuple[tuple[str, ...], ...]:
    """Finds equal layers in a row of a functional model: runs of names, in order (ADR 46).

    In a row means that each is called once, and its only output goes to the next one alone, as the
    first argument; the other arguments are the same.
    """
    users: dict[int, list[Any]] = {}
    calls: dict[int, int] = {}
    nodes = [node for node in keras_private.nodes_of(graph) if not node.is_input]
    for node in nodes:
        calls[id(node.operation)] = calls.get(id(node.operation), 0) + 1
        for tensor in node.arguments.keras_tensors:
            users.setdefault(id(tensor), []).append(node)
    final = {id(tensor) for tensor in graph.outputs}

    def only_reader(node: Any) -> Any:
        readers = users.get(id(node.outputs[0]), [])
        alone = len(node.outputs) == 1 and len(readers) == 1 and id(node.outputs[0]) not in final
        return readers[0] if alone and calls[id(node.operation)] == 1 else None

    following = {id(node): only_reader(node) for node in nodes}
    joined = {
        id(node): following[id(node)]
        for node in nodes
        if following[id(node)] is not None and _repeat(node, following[id(node)], calls)
    }
    inner = {id(reader) for reader in joined.values()}
    return tuple(
        tuple(call.operation.name for call in _row(node, joined))
        for node in nodes
        if id(node) in joined and id(node) not in inner
    )


def _row(node: object, joined: Mapping[int, object]) -> Iterator[Any]:
    yield node
    while id(node) in joined:
        node = joined[id(node)]
        yield node


def _repeat(node: Any, after: Any, calls: Mapping[int, int]) -> bool:
    """Checks that `after` calls a layer equal to that of `node`, on its output."""
    one, other = node.operation, after.operation
    if not (isinstance(one, Layer) and one.path and isinstance(other, Layer) and other.path):
        return False
    args, kwargs = node.arguments.args, node.arguments.kwargs
    next_args, next_kwargs = after.arguments.args, after.arguments.kwargs
    output = node.outputs[0]
    return (
        calls[id(other)] == 1
        and bool(args and next_args)
        and next_args[0] is output
        and _is_like(args[0], output)
        and not {id(v) for v in one.variables} & {id(v) for v in other.variables}
        and _are_same((args[1:], kwargs), (next_args[1:], next_kwargs))
        and _Equality().holds(one, other)
    )


def _is_like(one: object, other: KerasTensor) -> bool:
    return isinstance(one, KerasTensor) and one.shape == other.shape and one.dtype == other.dtype


def _are_same(some: object, others: object) -> bool:
    """Compares the arguments of two calls: tensors by identity, others as `_Equality` does."""
    pairs = zip(keras.tree.flatten(some), keras.tree.flatten(others), strict=False)
    return len(keras.tree.flatten(some)) == len(keras.tree.flatten(others)) and all(
        one is other or (not isinstance(one, KerasTensor) and _Equality().holds(one, other))
        for one, other in pairs
    )


@attrs.define
class _Equality:
    """Compares what two layers hold: configuration, layers, variables and functions, not values."""

    _pairs: dict[int, tuple[object, object]] = attrs.field(factory=dict, init=False)

    def holds(self, one: object, other: object) -> bool:
        """Tells whether a step does the same with `one` as with `other`."""
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, _PLAIN):
            return bool(one == other)
        if _is_noted(one):
            return True
        if id(one) in self._pairs:  # it holds itself
            return self._pairs[id(one)][1] is other
        self._pairs[id(one)] = one, other  # kept, so that no other object gets the id
        return self._of_objects(one, other)

    def _of_objects(self, one: Any, other: Any) -> bool:
        if isinstance(one, list | tuple):
            return self.all_hold(
                *([value for value in values if not _is_noted(value)] for values in (one, other))
            )
        if isinstance(one, dict):
            return self.all_hold(list(one.items()), list(other.items()))
        for kind, compare in _COMPARED:
            if isinstance(one, kind):
                return compare(self, one, other)
        return self._of_attributes(one, other)

    def all_hold(self, some: list[object], others: list[object]) -> bool:
        return len(some) == len(others) and all(map(self.holds, some, others))

    def _of_attributes(self, one: object, other: object) -> bool:
        if not hasattr(one, "__dict__"):
            return bool(one == other)
        own, its = vars(one), vars(other)
        if own.keys() != its.keys():
            return False
        return all(
            self.holds(value, its[name])
            for name, value in own.items()
            if name.lstrip("_") not in _NAMES
        )


def _is_noted(value: object) -> bool:
    noted = (keras_private.is_bookkeeping, keras_private.is_callback, keras_private.is_tracker)
    # Keras has the parameters of a layer in such a dict, besides its variables.
    return isinstance(value, torch.nn.ParameterDict) or any(is_of(value) for is_of in noted)


def _are_functions_equal(equality: _Equality, one: Any, other: Any) -> bool:
    cells = [
        [cell.cell_contents for cell in function.__closure__ or ()] for function in (one, other)
    ]
    return one.__code__ is other.__code__ and equality.all_hold(*cells)


def _alike(_equality: _Equality, one: Any, other: Any) -> bool:
    return (tuple(one.shape), one.dtype) == (tuple(other.shape), other.dtype)


_COMPARED: tuple[tuple[Any, Callable[[_Equality, Any, Any], bool]], ...] = (
    (keras.Variable, lambda equality, one, other: _alike(equality, one, other)
     and one.trainable == other.trainable),
    (torch.Tensor, _alike),
    (np.ndarray, lambda _, one, other: bool(np.array_equal(one, other))),
    (_DRAW, lambda _equality, _one, _other: True),
    (MethodType, lambda equality, one, other: one.__func__ is other.__func__
     and equality.holds(one.__self__, other.__self__)),
    (FunctionType, _are_functions_equal),
    (set | frozenset, lambda _, one, other: one == other),
)  # fmt: skip
