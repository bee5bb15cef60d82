"""Attributes in which Keras and torch note things on layers, models and their runs."""

import keras
from keras.src.callbacks import Callback, CallbackList
from keras.src.ops.node import Node
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils.tracking import Tracker

from shardcore.binding.keras_private.training import FILLS_CACHE, LOOP_STEPS

# Attributes of a trainer on its runs, which no step reads.
RUNS_NOTED = {
    *(FILLS_CACHE, LOOP_STEPS, "_eval_epoch_iterator", "_initial_epoch", "history"),
    *("predict_function", "test_function", "train_function"),
    *("stop_evaluating", "stop_predicting", "stop_training"),
}
# Attributes of a layer that Keras empties and fills in each step.
REFILLED = {"_losses", "_loss_ids", "_losses_override"}
# Attributes that Keras or torch sets when it makes or builds a layer, and that no step changes.
FIXED = {
    *("name", "_path", "_parent_path", "_lock", "_called", "_call_signature", "build"),
    *("_call_has_training_arg", "_call_has_mask_arg", "_call_has_context_arg", "_auto_config"),
    *("_allow_non_tensor_positional_args", "_input_spec"),
    *("_call_context_args", "call_signature_parameters", "_build_shapes_dict", "built"),
}

_BOOKKEEPING = (keras.KerasTensor, Node, EpochIterator, DataAdapter, Tracker)
# The parameters of a layer as torch sees them, which Keras makes again when a variable is added.
_PARAMETERS = "_torch_params"


def is_bookkeeping(value: object, name: object = None) -> bool:
    """Tells whether an attribute only notes things on a model or its runs: no step reads it."""
    is_of_torch = type(name) is str and name == _PARAMETERS
    return is_of_torch or issubclass(type(value), _BOOKKEEPING)  # isinstance may run its code


def is_callback(value: object) -> bool:
    """Tells whether `value` is a callback, or a list of some that Keras makes."""
    return issubclass(type(value), (Callback, CallbackList))
