"""Properties of a trainer: overridden steps, callbacks that read steps, data."""

from typing import Any

from keras.src.backend.torch import trainer as torch_trainer
from keras.src.callbacks import (
    BackupAndRestore,
    Callback,
    CallbackList,
    ModelCheckpoint,
    ProgbarLogger,
)
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.utils.python_utils import is_default


class Auto(str):
    """The value of `jit_compile="auto"`: falsy for Keras, which would call torch.compile.

    It is written into files as "auto", and so read again.
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        return False


AUTO = Auto("auto")


def is_own_step(trainer: Any, name: str) -> bool:
    """Returns whether the user has overridden the method `name`, such as `train_step`."""
    return getattr(type(trainer), name) is not getattr(torch_trainer.TorchTrainer, name)


def gives_own_logs(trainer: Any, step: str) -> bool:
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


def _rests(callback: Callback, phase: str) -> bool:
    """Returns whether it is a callback of Keras whose hooks between steps do nothing."""
    if type(callback) is ProgbarLogger:
        return bool(callback.verbose != 1 or (phase == "test" and callback._called_in_fit))
    if type(callback) in (ModelCheckpoint, BackupAndRestore):
        return bool(callback.save_freq == "epoch")
    return False


def arrays_of(adapter: Any) -> Any:
    """Returns the nested arrays from which a data adapter cuts its batches; None without."""
    return adapter._inputs if isinstance(adapter, ArrayDataAdapter) else None


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """Returns inputs, targets and sample weights of a batch as `fit` takes it."""
    parts: tuple[Any, Any, Any] = data_adapter_utils.unpack_x_y_sample_weight(batch)
    return parts
