"""Makes a plan for a Keras model, built or to be built."""

from collections.abc import Callable
from typing import Any

import keras

from shardcore.binding import seams
from shardcore.binding.describe import describe
from shardcore.binding.plan import Plan
from shardcore.domain.errors import PolicyError
from shardcore.domain.mesh import Mesh
from shardcore.policies.rules import Rule
from shardcore.ports.model import LayerFacts

Choose = Callable[[LayerFacts, Mesh], tuple[Rule, ...]]


def make_plan(model: Any, mesh: Any, policy: str, choose: Choose) -> Plan:
    """The plan that a policy makes for `model`, a built model or a function that builds one.

    Raises:
        PolicyError: If there is no built model to plan for, or no mesh.
    """
    device_mesh = _device_mesh(mesh)
    facts = _facts(model)
    rules = choose(facts, Mesh(device_mesh.shape, device_mesh.axis_names))
    outputs = [layer.output_path for layer in facts.layers() if layer.output_path]
    return Plan(device_mesh, policy, facts.all_variables(), outputs, rules)


def _device_mesh(mesh: Any) -> Any:
    """The Keras mesh; of a `Mesh`, which has no devices, one with made-up names for them."""
    if isinstance(mesh, Mesh):
        devices = [f"device:{rank}" for rank in range(mesh.size)]
        return keras.distribution.DeviceMesh(mesh.shape, mesh.axis_names, devices)
    if isinstance(mesh, keras.distribution.DeviceMesh):
        return mesh
    raise PolicyError(
        f"A plan is for a keras.distribution.DeviceMesh, or, where the devices are not at hand, a "
        f"shardcore.domain.mesh.Mesh((2, 4), ('data', 'model')); got {mesh!r}."
    )


def _facts(model: Any) -> LayerFacts:
    if isinstance(model, keras.layers.Layer):
        return _described(model, "the model")
    if not callable(model):
        raise PolicyError(
            f"A plan is for a built Keras model or a function that builds one, got {model!r}."
        )
    name = f"{getattr(model, '__name__', repr(model))}()"
    with seams.without_distribution(), seams.unnoticed(), keras.device("meta"):
        built = _built(model, name)
        if keras.distribution.distribution() is not None:
            raise PolicyError(
                f"{name} sets a distribution, and a plan is what one is made of: take "
                "set_distribution(...) out of it, and call it after the plan is made."
            )
        return _described(built, f"what {name} returned")


def _built(build: Callable[[], Any], name: str) -> Any:
    """The model, on the meta device, which has shapes and no values."""
    try:
        return build()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        raise PolicyError(
            f"{name} was called to see the model's shapes only, on the meta device, and reads "
            f"values ({error}): load weights and the like outside it, or give the built model "
            f"itself, with names of its own for the model and its layers: shardcore.plan({name}, "
            "mesh)."
        ) from error


def _described(model: Any, what: str) -> LayerFacts:
    if not isinstance(model, keras.layers.Layer):
        raise PolicyError(f"{what} is {type(model).__name__}, expected a Keras model.")
    if not model.built or not model.variables:
        raise PolicyError(
            f"{what}, {model.name!r}, is not built, so it has no variables yet: give it an Input, "
            "call it on a batch, or call model.build(shape)."
        )
    return describe(model)
