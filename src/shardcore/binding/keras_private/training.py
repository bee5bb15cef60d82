"""Trainers: their steps, logs, callbacks and data adapters."""

from collections.abc import Callable
from typing import Any

import keras
import torch
from keras import Model
from keras.src.callbacks import (
    BackupAndRestore,
    Callback,
    CallbackList,
    CSVLogger,
    EarlyStopping,
    History,
    ModelCheckpoint,
    ProgbarLogger,
    ReduceLROnPlateau,
    TensorBoard,
    TerminateOnNaN,
)
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils.python_utils import is_default, pythonify_logs

from shardcore.binding.keras_private.lines import LINE, find

TRAINER = find("keras.src.backend.torch.trainer:TorchTrainer")

# The callbacks that write files, and the attribute of each that has the path.
_PATHS: tuple[tuple[type[Callback], str], ...] = (
    (BackupAndRestore, "backup_dir"),
    (CSVLogger, "filename"),
    (ModelCheckpoint, "filepath"),
    (TensorBoard, "log_dir"),
)
# The attribute of a model in which the captured steps of its loops are kept.
LOOP_STEPS = "_shardcore_loop_steps"
# The method by which a model of keras-hub fills its cache with the prompt.
FILLS_CACHE = "_build_cache"
# Methods of a model that make the functions which run the steps of an epoch.
_LOOPS = ("make_train_function", "make_test_function")
# Callbacks that call nothing of a user's in a step.
_QUIET = (
    *(BackupAndRestore, EarlyStopping, History, ModelCheckpoint, ProgbarLogger),
    *(ReduceLROnPlateau, TerminateOnNaN),
)


class Auto(str):
    """The value of `jit_compile="auto"`: falsy for Keras, which would call torch.compile.

    It is written into files as "auto", and so read again.
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        return False


AUTO = Auto("auto")


def results_of(trainer: Model) -> dict[str, Any]:
    """Computes the metrics of a model: tensors, by name."""
    results: dict[str, Any] = {}
    for metric in trainer.metrics:
        result = metric.result()
        results |= result if isinstance(result, dict) else {metric.name: result}
    return results


def as_logs(results: object) -> Any:
    """Converts the results of metrics as Keras does after a step: in Keras 3.13 to numbers."""
    is_old = LINE < (3, 14) and isinstance(results, dict)
    return pythonify_logs(results) if is_old and results else results


def logs_of_step(trainer: Model, step: str, logs: object) -> Any:
    """Converts the logs of a step as Keras does; logs of a user's step stay tensors."""
    of_metrics = LINE < (3, 14) and step != "predict_step" and not gives_own_logs(trainer, step)
    return as_logs(logs) if of_metrics else logs


def is_own_step(trainer: Model, name: str) -> bool:
    """Tells whether the user has overridden the method `name` of Keras, as `train_step`."""
    of_keras = getattr(TRAINER, name, None)
    return of_keras is not None and getattr(type(trainer), name) is not of_keras


def gives_own_logs(trainer: Model, step: str) -> bool:
    """Tells whether the method `step` may return other logs than the results of metrics."""
    names = (step, "compute_metrics", "get_metrics_result", "_get_metrics_result_or_logs")
    return any(name in vars(trainer) or is_own_step(trainer, name) for name in names)


def read_steps(callbacks: CallbackList, phase: str) -> bool:
    """Tells whether one of `callbacks` acts between two steps of a fit or an evaluate."""
    return type(callbacks) is not CallbackList or any(
        not all(map(is_default, _hooks(callback, phase))) and not _reads_no_step(callback, phase)
        for callback in callbacks.callbacks
    )


def act_between_steps(callbacks: CallbackList, phase: str) -> bool:
    """Tells whether a callback of the user acts between two steps."""
    return type(callbacks) is not CallbackList or not all(
        all(map(_is_of_library, _hooks(callback, phase))) for callback in callbacks.callbacks
    )


def _hooks(callback: Callback, phase: str) -> list[Any]:
    kinds = (f"{phase}_batch", "batch") if phase == "train" else (f"{phase}_batch",)
    return [getattr(callback, f"on_{kind}_{when}") for kind in kinds for when in ("begin", "end")]


def run_no_code_of_users(callbacks: CallbackList) -> bool:
    """Checks that `callbacks` are Keras' own, and those of a step run no code of a model.

    Nor may a function of the user run in the place of Keras' loop, its list of callbacks or its
    progress bar, or for the attribute that the loop reads after each step.
    """
    model = callbacks._model
    loops = [getattr(model, name) for name in _LOOPS]
    bar = keras.utils.Progbar.update, keras.utils.Progbar.add
    return (
        type(callbacks) is CallbackList
        and not hasattr(type(model), "stop_training")
        and all(map(_is_of_library, (*loops, *_class_hooks(CallbackList), *bar)))
        and all(
            _is_quiet(callback)
            and not any(name.startswith("on_") for name in vars(callback))
            and getattr(callback, "save_freq", "epoch") == "epoch"
            for callback in callbacks.callbacks
        )
    )


def _is_quiet(callback: Callback) -> bool:
    # The attribute of the class itself: a subclass may run other code.
    kind = type(callback)
    is_known = kind in _QUIET or "runs_no_code_of_users" in vars(kind)
    return is_known and all(map(_is_of_library, _class_hooks(kind)))


def _class_hooks(kind: type) -> list[Any]:
    return [getattr(kind, name) for name in dir(kind) if name.startswith("on_")]


def _is_of_library(function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith(("keras.", "shardcore."))


def thread_name_of(callbacks: CallbackList) -> str:
    """The prefix of the names of the threads on which Keras calls `callbacks` after batches."""
    executor = getattr(callbacks, "_executor", None)
    return "MainThread" if executor is None else str(executor._thread_name_prefix)


def sort_callbacks(callbacks: CallbackList) -> None:
    """Moves callbacks with `comes_first` before the others, and those with `comes_last` behind.

    The first ones add to the logs that the others show; the last ones save the states of others.
    """
    callbacks.callbacks.sort(
        key=lambda callback: (
            not getattr(callback, "comes_first", False),
            getattr(callback, "comes_last", False),
        )
    )


def begin_later(
    iterator: EpochIterator, begin: Callable[[EpochIterator], object], batches: int, steps: int
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


def _reads_no_step(callback: Callback, phase: str) -> bool:
    if "reads_no_results" in vars(type(callback)):  # not of a base: a subclass may read them
        return True
    if type(callback) is ProgbarLogger:
        return bool(callback.verbose != 1 or (phase == "test" and callback._called_in_fit))
    if type(callback) in (ModelCheckpoint, BackupAndRestore):
        return bool(callback.save_freq == "epoch")
    return False


def arrays_of(adapter: DataAdapter) -> Any:
    """The nested arrays from which a data adapter cuts its batches; None without."""
    return adapter._inputs if isinstance(adapter, ArrayDataAdapter) else None


def loader_of(adapter: DataAdapter) -> torch.utils.data.DataLoader[Any] | None:
    """The user's `DataLoader` of a data adapter; None without."""
    return adapter._dataloader if isinstance(adapter, TorchDataLoaderAdapter) else None


def begin_at(model: Model, epoch: int | None) -> None:
    """Sets the first epoch of the next `fit` of a model; None for its argument `initial_epoch`."""
    model._initial_epoch = epoch


def build_by(model: Model, data: object) -> None:
    """Builds a compiled model by the shapes of one step's data, with its metrics and optimizer."""
    model._symbolic_build(data_batch=data)


def first_epoch(model: Model, initial_epoch: int) -> int:
    """The epoch at which a fit begins: `initial_epoch`, unless `begin_at` has set another."""
    return int(model._initial_epoch or initial_epoch)


def progress_of(callback: BackupAndRestore) -> tuple[int, int]:
    """The epoch and the last batch that a `BackupAndRestore` has seen."""
    return callback._current_epoch, callback._last_batch_seen


def set_progress(callback: BackupAndRestore, epoch: int, steps: int) -> None:
    """Sets the epoch and the steps that a `BackupAndRestore` has seen, and leaves none unsaved."""
    callback._current_epoch = epoch
    callback._last_batch_seen = max(steps - 1, 0)
    callback._batches_seen_since_last_saving = 0


def save_backup(callback: BackupAndRestore) -> None:
    """Lets a `BackupAndRestore` save now."""
    callback._save_model()


def saves_at_epochs(callback: BackupAndRestore) -> bool:
    """Tells whether a `BackupAndRestore` saves at the end of each epoch, and at no step."""
    return bool(callback.save_freq == "epoch")


def path_of_files(callback: Callback) -> str | None:
    """Reads the path to which a callback of Keras or a subclass writes; None without."""
    for kind, name in _PATHS:
        if isinstance(callback, kind):
            return str(getattr(callback, name))
    return None


def weights_path(callback: BackupAndRestore) -> str:
    """The file that a `BackupAndRestore` writes."""
    return str(callback._weights_path)


def save_functions(callbacks: CallbackList) -> list[Callable[[], None]]:
    """Lists the functions of callbacks that save now all that a resumed fit needs."""
    backups = [c for c in callbacks.callbacks if isinstance(c, BackupAndRestore)]
    ours = [c.save_here for c in callbacks.callbacks if hasattr(c, "save_here")]
    return [*(backup._save_model for backup in backups), *ours]


def path_of(callback: Callback) -> str:
    """Reads the path of a callback from any attribute that may have it; empty without."""
    names = ("backup_dir", "filepath", "filename", "log_dir", "_log_dir")
    paths = (getattr(callback, name, None) for name in names)
    return next((str(path) for path in paths if path), "")
