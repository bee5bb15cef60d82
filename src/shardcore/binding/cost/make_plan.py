"""Plans for Keras models: the facts of a model, which a policy gets, and the layout map."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

import keras

from shardcore.binding import keras_private
from shardcore.binding.cost.plan import Plan
from shardcore.binding.cost.repeats import runs_of
from shardcore.binding.keras_private.patches import replaces_value
from shardcore.binding.keras_private.variables import tensor_of
from shardcore.binding.ranks.session import Sessions
from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies.rules import PlannedRules
from shardcore.ports.policy import LayerFacts, VariableFacts
from shardcore.ports.types import MeshLike

Choose = Callable[[LayerFacts, Mesh], PlannedRules]


def make_plan(
    model: object, mesh: MeshLike, policy: str, choose: Choose, sessions: Sessions | None
) -> Plan:
    """Returns the plan of a policy for `model`, a built model or a function that builds one.

    `sessions` are those of the installation, None without one.
    """
    device_mesh = _device_mesh(mesh)
    facts = facts_of(model, sessions)
    planned = choose(facts, Mesh(device_mesh.shape, device_mesh.axis_names))
    return plan_of(facts, device_mesh, policy, planned)


def facts_of(model: object, sessions: Sessions | None) -> LayerFacts:
    """Returns the facts of `model`, a built model or a function that builds one."""
    if isinstance(model, keras.layers.Layer):
        return _describe_checked(model, "the model")
    if not callable(model):
        raise PolicyError(
            f"A plan is for a built Keras model or a function that builds one, got {model!r}.",
            got=repr(model),
        )
    name = f"{getattr(model, '__name__', repr(model))}()"
    refusing = partial(_refusing_distributions, name)
    building = refusing if sessions is None else sessions.ignoring_distributions
    try:
        # The meta device has shapes, and no values.
        return _facts_of_built(model, name, building(), keras.device("meta"))
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
    # The function reads numbers, such as those of `keras.ops.linspace`. Only variables lack values.
    return _facts_of_built(model, name, building(), keras_private.variables_without_memory(name))


def plan_of(facts: LayerFacts, mesh: MeshLike, policy: str, planned: PlannedRules) -> Plan:
    """Returns the plan over `mesh` that has the rules of a policy."""
    outputs = [layer.output_path for layer in facts.layers() if layer.output_path]
    return Plan(_device_mesh(mesh), policy, facts.all_variables(), outputs, planned)


def joined_mesh(mesh: Mesh) -> Any:
    """Returns the Keras mesh over all devices of the job, which this process joins."""
    return keras.distribution.DeviceMesh(mesh.shape, mesh.axis_names)


def _device_mesh(mesh: MeshLike) -> Any:
    """Returns the Keras mesh; for a `Mesh`, which has no devices, one with placeholder names."""
    if isinstance(mesh, Mesh):
        devices = [f"device:{rank}" for rank in range(mesh.size)]
        return keras.distribution.DeviceMesh(mesh.shape, mesh.axis_names, devices)
    if isinstance(mesh, keras.distribution.DeviceMesh):
        return mesh
    raise PolicyError(
        f"A plan is for a keras.distribution.DeviceMesh, or, where the devices are not at hand, a "
        f"shardcore.domain.layouts.mesh.Mesh((2, 4), ('data', 'model')); got {mesh!r}.",
        got=repr(mesh),
    )


class _Refusing:
    """The place of a backend's library of distributions: each use is an error."""

    def __init__(self, error: PolicyError) -> None:
        self._error = error

    @replaces_value(
        "keras.src.distribution.distribution_lib:distribution_lib",
        reason="A function that builds a model for a plan may set no distribution.",
    )
    def instead_of_none(self, original: object) -> object:
        """Replaces the library that Keras lacks on torch; one that is installed stays."""
        return original or self

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error


@contextmanager
def _refusing_distributions(name: str) -> Iterator[None]:
    """Opens a context in which the function `name` may set no distribution.

    Keras to 3.15 has no library for distributions on torch: it fails where one is made.
    """
    error = PolicyError(
        f"{name} sets a distribution, which a plan can only pass over where shardcore is "
        "installed: call shardcore.install() first."
    )
    with keras_private.replaced(_Refusing(error).instead_of_none):
        yield
    if keras.distribution.distribution() is not None:
        raise error


def _facts_of_built(
    build: Callable[[], object],
    name: str,
    building: AbstractContextManager[None],
    values: AbstractContextManager[None],
) -> LayerFacts:
    """Returns the facts of the model that function `name` builds in the context `values`."""
    with (
        keras_private.without_distribution(),
        keras_private.restored_counts_and_seeds(),
        keras_private.repeating_shapes(),
        values,
    ):
        with building:
            built = build()
        return _describe_checked(built, f"what {name} returned")


def _describe_checked(model: object, what: str) -> LayerFacts:
    if not isinstance(model, keras.layers.Layer):
        raise PolicyError(f"{what} is {type(model).__name__}, expected a Keras model.")
    if not model.built or not model.variables:
        raise PolicyError(
            f"{what}, {model.name!r}, is not built, so it has no variables yet: give it an Input, "
            "call it on a batch, or call model.build(shape).",
            name=model.name,
        )
    return describe(model)


# Keys in the configuration of a layer.
CONFIG = ("activation", "axis", "data_format", "groups", "equation", "num_heads")


def describe(model: keras.Layer) -> LayerFacts:
    """Returns the facts of a built model: every layer and variable once, at its first place.

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
    """Returns the path of a layer, the name of an input; empty for an operation."""
    is_input = isinstance(layer, keras.layers.InputLayer)  # it has no path in Keras
    return layer.name if is_input else getattr(layer, "path", None) or ""


def _variable(variable: keras.Variable) -> VariableFacts:
    shape, itemsize = tuple(variable.shape), tensor_of(variable).element_size()
    return VariableFacts(variable.path, shape, itemsize, bool(variable.trainable))


def _input_shape(layer: keras.Operation) -> tuple[int | None, ...] | None:
    """Returns the only shape with which `layer` was built, None if that is unknown."""
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
    """Returns the names of its classes below Keras' `Layer`, or `Operation`."""
    bases = set(keras.layers.Layer.__mro__)
    return tuple(kind.__name__ for kind in type(layer).__mro__ if kind not in bases) or ("Layer",)


def _config(layer: keras.Operation) -> dict[str, Any]:
    config = {name: getattr(layer, name) for name in CONFIG if hasattr(layer, name)}
    if callable(config.get("activation")):
        activation = config["activation"]
        config["activation"] = getattr(activation, "__name__", type(activation).__name__)
    ndim = getattr(getattr(layer, "input_spec", None), "ndim", None)
    axis = config.get("axis")
    if isinstance(axis, int) and axis >= 0 and ndim is not None:
        config["axis"] = axis - ndim
    return {name: value for name, value in config.items() if value is not None}
