"""Keras objects: parts of models and optimizers, steps and callbacks of trainers, nests."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import torch
from keras import Model, Variable
from keras.optimizers import Adam, Optimizer
from keras.src import tree
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.variables import Variable as VariableOfAnyBackend
from keras.src.backend.torch.optimizers import torch_adam
from keras.src.callbacks import (
    BackupAndRestore,
    Callback,
    CallbackList,
    ModelCheckpoint,
    ProgbarLogger,
)
from keras.src.ops.node import Node
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator as EpochIterator
from keras.src.utils.python_utils import is_default, pythonify_logs

from shardcore.binding.keras_private.lines import LINE, find

ADAM = torch_adam.__name__  # imported above, since Keras imports it only with the first Adam


def parts_of(trainer: Model) -> list[Any]:
    """Returns the objects that the steps of a model call: layers, optimizer, metrics, losses."""
    found = [
        *trainer._flatten_layers(),
        getattr(trainer, "optimizer", None),
        getattr(trainer, "_compile_loss", None),
        *(trainer.metrics if getattr(trainer, "compiled", False) else []),
    ]
    return list({id(each): each for each in found if each is not None}.values())


def modules_of(trainer: Model) -> list[tuple[str, Any]]:
    """Returns the torch modules of a model, with its layers, also those that no other one holds."""
    found: dict[int, tuple[str, Any]] = {}
    for layer in trainer._flatten_layers():
        for name, module in layer.named_modules():
            found.setdefault(id(module), (f"{layer.name}.{name}".rstrip("."), module))
    return list(found.values())


def graph_tensors(trainer: Model) -> Iterator[tuple[str, dict[str, Any], list[torch.Tensor]]]:
    """Yields the calls in functional graphs that have tensors as constant arguments.

    Each is the name of the called layer or operation, the attributes `args` and `kwargs` of the
    call, and the tensors.
    """
    for layer in trainer._flatten_layers():
        graph = getattr(layer, "_nodes_by_depth", {})
        for node in (each for nodes in graph.values() for each in nodes):
            arguments = tree.flatten((node.arguments.args, node.arguments.kwargs))
            tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
            if tensors:
                yield node.operation.name, vars(node.arguments), tensors


def hook_of(trainer: Model, hooks_of: Callable[[Any], Iterable[Any]]) -> str:
    """Returns the name of the first module of a model with a user's hook, empty without one."""
    for name, module in modules_of(trainer):
        for hook in hooks_of(module):
            if not (getattr(hook, "__module__", None) or "").startswith("shardcore."):
                return f"module {name!r}"
    return ""


TRAINER = find("keras.src.backend.torch.trainer:TorchTrainer")

# The attribute of a model in which the captured steps of its loops are kept.
LOOP_STEPS = "_shardcore_loop_steps"

# Attributes of a trainer on its runs, which no step reads.
RUNS_NOTED = {
    LOOP_STEPS,
    "_eval_epoch_iterator",
    "_initial_epoch",
    "history",
    "predict_function",
    "stop_evaluating",
    "stop_predicting",
    "stop_training",
    "test_function",
    "train_function",
}


def is_bookkeeping(value: object) -> bool:
    """Returns whether `value` is bookkeeping on a model or its runs, which no step reads."""
    of_keras = keras.KerasTensor | Node | Callback | CallbackList | EpochIterator | DataAdapter
    return isinstance(value, of_keras | torch.nn.ParameterDict | torch.nn.ParameterList)


def is_seed(variable: Variable) -> bool:
    """Returns whether the variable is the state of a `keras.random.SeedGenerator`, by its name."""
    return bool(variable.name == "seed_generator_state")


def is_saved_in_another_form(layer: Any) -> bool:
    """Returns whether weight files have other values than the variables of `layer`."""
    return (
        isinstance(layer, keras.layers.TorchModuleWrapper)
        or getattr(layer, "lora_enabled", False)
        or getattr(layer, "quantization_mode", None) is not None
    )


def weights_by_moment(optimizer: Optimizer, model: Model) -> dict[int, Variable]:
    """Returns, by the `id` of each moment of an optimizer, the weight of `model` it belongs to.

    Keras (3.15) puts the path of the weight before the name of the moment.
    """
    begins = [(f"{each.path.replace('/', '_')}_", each) for each in model.trainable_variables]
    begins.sort(key=lambda pair: len(pair[0]))
    return {
        id(moment): weight
        for moment in optimizer.variables
        for begin, weight in begins
        if moment.name.startswith(begin) and tuple(moment.shape) == tuple(weight.shape)
    }


def moments_of(optimizer: Adam, variables: Sequence[Variable]) -> tuple[list[torch.Tensor], ...]:
    """Returns the tensors of an `Adam`: first and second moments, and the largest second ones.

    The last list is empty, unless the optimizer has `amsgrad`.
    """
    kept = [optimizer._momentums, optimizer._velocities]
    kept.append(optimizer._velocity_hats if optimizer.amsgrad else [])
    places = [optimizer._get_variable_index(each) for each in variables]
    return tuple([each[place].value for place in places] if each else [] for each in kept)


class Auto(str):
    """The value of `jit_compile="auto"`: falsy for Keras, which would call torch.compile.

    It is written into files as "auto", and so read again.
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        return False


AUTO = Auto("auto")


def repr_with_value(variable: Variable) -> str:
    """Returns what Keras prints for a variable; Keras 3.16 leaves out the value of a DTensor."""
    return str(VariableOfAnyBackend.__repr__(variable))


def results_of(trainer: Model) -> dict[str, Any]:
    """Returns the results of the metrics of a model by name, as tensors."""
    found: dict[str, Any] = {}
    for metric in trainer.metrics:
        result = metric.result()
        found |= result if isinstance(result, dict) else {metric.name: result}
    return found


def as_logs(results: object) -> Any:
    """Returns the results of metrics as Keras has them after a step: in Keras 3.13 as numbers."""
    is_old = LINE < (3, 14) and isinstance(results, dict)
    return pythonify_logs(results) if is_old and results else results


def is_own_step(trainer: Model, name: str) -> bool:
    """Returns whether the user has overridden the method `name`, such as `train_step`."""
    return getattr(type(trainer), name) is not getattr(TRAINER, name)


def gives_own_logs(trainer: Model, step: str) -> bool:
    """Returns whether the method `step` returns other logs than the results of the metrics."""
    names = (step, "compute_metrics", "get_metrics_result", "_get_metrics_result_or_logs")
    return any(name in vars(trainer) or is_own_step(trainer, name) for name in names)


def read_steps(callbacks: CallbackList, phase: str) -> bool:
    """Returns whether one of `callbacks` acts between two steps of a fit or an evaluate."""
    if type(callbacks) is not CallbackList:
        return True
    hooks = [f"on_{phase}_batch_{when}" for when in ("begin", "end")]
    hooks += ["on_batch_begin", "on_batch_end"] if phase == "train" else []
    return any(
        any(not is_default(getattr(each, hook)) for hook in hooks) and not _rests(each, phase)
        for each in callbacks.callbacks
    )


def sort_callbacks(callbacks: CallbackList) -> None:
    """Brings those with the attribute `comes_last` behind the others, whose states they save."""
    callbacks.callbacks.sort(key=lambda each: getattr(each, "comes_last", False))


def begin_later(
    iterator: EpochIterator, begin: Callable[[EpochIterator], Any], batches: int, steps: int
) -> None:
    """Begins an epoch by `begin`, with its first `steps` steps done.

    With `steps_per_epoch`, `iterator` reads the same data from epoch to epoch: `batches` of them
    were drawn. Without it, each epoch reads from the beginning. `_get_iterator` draws them.
    """
    if iterator.steps_per_epoch:
        iterator._current_iterator = iter(iterator._get_iterator())
        iterator._steps_seen = batches - steps
    begin(iterator)
    for _ in range(0, steps, iterator.steps_per_execution):
        next(iterator._epoch_iterator)


def _rests(callback: Callback, phase: str) -> bool:
    """Returns whether its hooks between steps read no results, or do nothing."""
    if getattr(callback, "reads_no_results", False):
        return True
    if type(callback) is ProgbarLogger:
        return bool(callback.verbose != 1 or (phase == "test" and callback._called_in_fit))
    if type(callback) in (ModelCheckpoint, BackupAndRestore):
        return bool(callback.save_freq == "epoch")
    return False


def arrays_of(adapter: DataAdapter) -> Any:
    """Returns the nested arrays from which a data adapter cuts its batches; None without."""
    return adapter._inputs if isinstance(adapter, ArrayDataAdapter) else None


def map_tensors(function: Callable[[Any], Any], structure: object) -> Any:
    """Returns `structure` with `function` applied to its tensors; the rest stays."""
    return tree.map_structure(
        lambda leaf: function(leaf) if keras.ops.is_tensor(leaf) else leaf, structure
    )


def leaves(structure: object) -> list[Any]:
    """Returns the leaves of `structure`, None among them."""
    found: list[Any] = tree.flatten(structure)
    return found


def map_leaves(function: Callable[[Any], Any], structure: object) -> Any:
    """Returns `structure` with `function` applied to every leaf but None."""
    return tree.map_structure(function, structure, none_is_leaf=False)


def packed(structure: object, found: Sequence[Any]) -> Any:
    """Returns the leaves `found` in the nesting of `structure`."""
    return tree.pack_sequence_as(structure, found)


def copy_mask(source: torch.Tensor, target: torch.Tensor) -> None:
    """Gives `target` the Keras mask of `source`, if it has one."""
    mask = get_keras_mask(source)
    if mask is not None:
        set_keras_mask(target, mask)
