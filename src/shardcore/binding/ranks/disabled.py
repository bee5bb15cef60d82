"""Patches: what Keras does with a distribution itself on torch, most of it since 3.16.

It makes DTensors of data, variables and logs; shardcore lays them out instead.
"""

from types import SimpleNamespace
from typing import Any

from shardcore.binding import keras_private
from shardcore.binding.keras_private.patches import replaces, replaces_value
from shardcore.binding.types import Original


@replaces_value(
    "keras.src.trainers.data_adapters:distribution_lib",
    reason="Refuses everything but tf.data in several processes; shardcore takes the rows itself.",
)
@replaces_value(
    "keras.src.trainers.data_adapters.array_data_adapter:distribution_lib",
    "keras.src.trainers.data_adapters.py_dataset_adapter:distribution_lib",
    "keras.src.trainers.data_adapters.torch_data_loader_adapter:distribution_lib",
    reason="Gives each process other batches; shardcore shards every batch.",
    since=(3, 16),
)
def library_of_adapters(_original: object) -> SimpleNamespace:
    """Replaces the module `distribution_lib` in the data adapters: they see no distribution."""
    return SimpleNamespace(distribution=lambda: None)


@replaces(
    "keras.src.backend.torch.trainer:distribution",
    reason="Lays out batches, outputs and metrics as DTensors of Keras.",
    since=(3, 16),
)
def distribution_of_trainer(_original: Original) -> None:
    """Replaces `distribution` in the trainer, which sees none."""


@replaces(
    "keras.src.backend.torch.trainer:TorchTrainer._initialize_ddp",
    reason="Wraps the model in DDP if there is a process group.",
    since=(3, 16),
)
def initialize_no_ddp(_original: Original, trainer: object) -> None:
    """Replaces `TorchTrainer._initialize_ddp`."""


@replaces(
    "keras.src.backend.torch.core:Variable._initialize_distributed",
    reason="Lays out the variable as a DTensor of Keras.",
    since=(3, 16),
)
def initialize_no_dtensor(_original: Original, variable: object, value: object) -> None:
    """Replaces `Variable._initialize_distributed`."""


@replaces_value(
    "keras.src.backend.torch.nn:DTensor",
    reason="Attention computes on the local shards of a DTensor, and makes a plain DTensor of "
    "them.",
    since=(3, 16),
)
def class_without_tensors(_original: type) -> type:
    """Replaces the class `DTensor` in attention by one of which no tensor is an instance."""
    return SimpleNamespace


@replaces(
    "keras.src.trainers.trainer:Trainer._resolve_auto_jit_compile",
    reason='On torch jit_compile="auto" becomes False, which a user may ask for too: '
    "both stay known.",
)
def unresolved_jit_compile(_original: Original, trainer: object) -> Any:
    """Replaces `Trainer._resolve_auto_jit_compile`: a captured step resolves it."""
    return keras_private.AUTO
