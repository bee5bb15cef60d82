"""What a model, or another object of Keras, is made of."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from keras.src import backend
from keras.src.callbacks import Callback, CallbackList
from keras.src.layers.layer import Layer
from keras.src.ops.node import Node
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator


def parts_of(trainer: Any) -> list[Any]:
    """The layers of a model, its optimizer, metrics and losses: what its steps call."""
    found = [
        *trainer._flatten_layers(),
        getattr(trainer, "optimizer", None),
        getattr(trainer, "_compile_loss", None),
        *(trainer.metrics if getattr(trainer, "compiled", False) else []),
    ]
    return list({id(each): each for each in found if each is not None}.values())


def modules_of(trainer: Any) -> list[tuple[str, Any]]:
    """The torch modules of a model, its layers among them, which do not all know each other."""
    found: dict[int, tuple[str, Any]] = {}
    for layer in trainer._flatten_layers():
        for name, module in layer.named_modules():
            found.setdefault(id(module), (f"{layer.name}.{name}".rstrip("."), module))
    return list(found.values())


def hook_of(trainer: Any, hooks_of: Callable[[Any], Iterable[Any]]) -> str:
    """The first module of a model that has a hook of the user's, empty if there is none."""
    for name, module in modules_of(trainer):
        for hook in hooks_of(module):
            if not (getattr(hook, "__module__", None) or "").startswith("shardcore."):
                return f"module {name!r}"
    return ""


# What a trainer notes of its runs, and no step looks at.
RUNS_NOTED = {
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


def is_bookkeeping(value: Any) -> bool:
    """Whether `value` tells how a model was made or is trained, which no step looks at."""
    of_keras = backend.KerasTensor | Node | Callback | CallbackList | EpochIterator | DataAdapter
    return isinstance(value, of_keras | torch.nn.ParameterDict | torch.nn.ParameterList)


def is_layer(value: Any) -> bool:
    """Whether `value` is a Keras layer, or keeps parameters for one."""
    return isinstance(value, Layer | torch.nn.ParameterDict | torch.nn.ParameterList)


def is_variable(value: Any) -> bool:
    """Whether `value` is a Keras variable."""
    return isinstance(value, backend.Variable)


def is_seed(variable: Any) -> bool:
    """Whether the variable is the state of a `keras.random.SeedGenerator`, by the name it gets."""
    return bool(variable.name == "seed_generator_state")
