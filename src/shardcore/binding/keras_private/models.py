"""Models and optimizers: their layers, graphs and moments."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import torch
from keras import Function, KerasTensor, Layer, Model, Operation, Variable
from keras.layers import EinsumDense
from keras.optimizers import Adam, LossScaleOptimizer, Optimizer
from keras.src import tree
from keras.src.backend.torch.optimizers import torch_adam, torch_nadam
from keras.src.ops.node import Node
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator as EpochIterator
from keras.src.utils.tracking import Tracker

# Imported above, since Keras imports them only with the first Adam and the first Nadam.
ADAM, NADAM = torch_adam.__name__, torch_nadam.__name__


def parts_of(trainer: Model) -> list[Any]:
    """Lists what the steps of a model call: layers, optimizer, metrics, losses; each once."""
    parts = [
        *layers_of(trainer),
        getattr(trainer, "optimizer", None),
        getattr(trainer, "_compile_loss", None),
        *(trainer.metrics if getattr(trainer, "compiled", False) else []),
    ]
    return list({id(part): part for part in parts if part is not None}.values())


def modules_of(trainer: Model) -> list[tuple[str, Any]]:
    """Lists the torch modules of a model by name: layers, and what they hold; each once."""
    modules: dict[int, tuple[str, Any]] = {}
    for layer in layers_of(trainer):
        for name, module in layer.named_modules():
            modules.setdefault(id(module), (f"{layer.name}.{name}".rstrip("."), module))
    return list(modules.values())


def uncleared_gradients(trainer: Model) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the gradients that no step clears, so that the next one adds to them.

    Of variables with one path, Keras gives torch the last as a parameter, and clears its gradient.
    Each is a name for people, and a function that returns the gradient.
    """
    cleared = set(map(id, trainer.parameters()))
    for variable in trainer.trainable_variables:
        if id(variable._value) not in cleared:
            yield f"the gradient of variable {variable.path!r}", partial(gradient_of, variable)


def gradient_of(variable: Variable) -> Any:
    """The gradient of the stored tensor, None without one."""
    return variable._value.grad


def graph_tensors(trainer: Model) -> Iterator[tuple[str, dict[str, Any], list[torch.Tensor]]]:
    """Yields the calls in functional graphs that have tensors as constant arguments.

    Each is the name of the called layer or operation, the attributes `args` and `kwargs` of the
    call, and the tensors.
    """
    for node in _nodes_in(trainer):
        arguments = tree.flatten((node.arguments.args, node.arguments.kwargs))
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        if tensors:
            yield node.operation.name, vars(node.arguments), tensors


def operations_of(trainer: Model) -> list[Any]:
    """Lists the operations in functional graphs that are no layers, such as `ops.clip`."""
    operations = (node.operation for node in _nodes_in(trainer))
    return [operation for operation in operations if not isinstance(operation, Layer)]


def _nodes_in(trainer: Model) -> Iterator[Node]:
    for layer in layers_of(trainer):
        for nodes in getattr(layer, "_nodes_by_depth", {}).values():
            yield from nodes


def hook_of(trainer: Model, hooks_of: Callable[[Any], Iterable[object]]) -> str:
    """Finds the first module of a model with a user's hook, by name; empty without one."""
    for name, module in modules_of(trainer):
        for hook in hooks_of(module):
            if not (getattr(hook, "__module__", None) or "").startswith("shardcore."):
                return f"module {name!r}"
    return ""


def is_saved_in_another_form(layer: object) -> bool:
    """Tells whether weight files have other values than the variables of `layer`."""
    return (
        isinstance(layer, keras.layers.TorchModuleWrapper)
        or getattr(layer, "lora_enabled", False)
        or getattr(layer, "quantization_mode", None) is not None
    )


def weights_by_moment(optimizer: Optimizer, model: Model) -> dict[int, Variable]:
    """Finds, by the `id` of each moment of an optimizer, the weight of `model` it is of.

    Keras (3.15) puts the path of the weight before the name of the moment.
    """
    begins = [(f"{weight.path.replace('/', '_')}_", weight) for weight in model.trainable_variables]
    begins.sort(key=lambda pair: len(pair[0]))
    return {
        id(moment): weight
        for moment in optimizer.variables
        for begin, weight in begins
        if moment.name.startswith(begin) and tuple(moment.shape) == tuple(weight.shape)
    }


def moments_of(optimizer: Adam, variables: Sequence[Variable]) -> tuple[list[torch.Tensor], ...]:
    """Lists the tensors of an `Adam`: first and second moments, and the largest second ones.

    The last list is empty, unless the optimizer has `amsgrad`.
    """
    kinds = [optimizer._momentums, optimizer._velocities]
    kinds.append(optimizer._velocity_hats if optimizer.amsgrad else [])
    indices = [optimizer._get_variable_index(variable) for variable in variables]
    return tuple(
        [moments[index].value for index in indices] if moments else [] for moments in kinds
    )


def code_of_user(optimizer: LossScaleOptimizer) -> str:
    """Finds the first part of an update that is not code of Keras; empty without one."""
    inner = optimizer.inner_optimizer
    rate = inner._learning_rate
    parts = {"the class": optimizer, "the inner class": inner, "the learning rate": rate}
    for variable in getattr(optimizer, "_trainable_variables", ()):
        if variable.constraint is not None:
            parts[f"the constraint of {variable.path!r}"] = variable.constraint
    own = (name for name, part in parts.items() if not type(part).__module__.startswith("keras."))
    return next(own, "")


def layers_of(model: Model) -> Iterator[Any]:
    """Yields a model and all layers in it, at any depth."""
    yield from model._flatten_layers()


def children_of(layer: Operation) -> Sequence[Any]:
    """The layers that a layer tracks as its own."""
    return getattr(layer, "_layers", ())


def is_tracker(value: object) -> bool:
    """Tells whether `value` lists the variables and layers of a layer, which has them too."""
    return isinstance(value, Tracker)


def graph_of(layer: Operation) -> Function | None:
    """The functional model with the graph of the layers in `layer`, None without one."""
    if isinstance(layer, keras.Sequential):
        return layer._functional
    return layer if isinstance(layer, Function) else None


def nodes_of(graph: Function) -> Iterator[Node]:
    """Yields the calls in a functional graph, the nearest to its outputs first."""
    for depth in sorted(graph._nodes_by_depth):
        yield from graph._nodes_by_depth[depth]


def input_names(model: Function) -> list[str]:
    """Names the layers that make the inputs of a functional model, in order."""
    return [producer_of(tensor).name for tensor in model._inputs]


def producer_of(tensor: KerasTensor) -> Any:
    """The layer or operation that has made a symbolic tensor."""
    return tensor._keras_history.operation


def track(layer: Layer, variable: Variable) -> None:
    """Makes `variable` one of the weights of `layer`."""
    layer._track_variable(variable)


def matrix_axes(layer: EinsumDense) -> Any:
    """The dims of the kernel that become the rows of its int4 matrix."""
    layer._set_quantization_info()
    return layer._kernel_reduced_axes
