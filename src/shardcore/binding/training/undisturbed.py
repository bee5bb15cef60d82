"""Whether code of the user may run between two steps of an epoch.

Where it may not, captured steps compare no Python state, and batches are drawn ahead. What is not
known counts as disturbing (ADR 55).
"""

import gc
import signal
import sys
import threading
from _thread import _count as count_threads
from typing import Any

import keras
import numpy as np
import torch
from keras.callbacks import CallbackList
from torch.utils.data import DataLoader

from shardcore.binding import keras_private
from shardcore.binding.trainer_run import TrainerRun

_THREADS = ("MainThread", "shardcore")
_LIBRARIES = ("torch", "keras", "shardcore", "hypothesis")
# Modules whose classes of streams write, and run no code of the user.
_STREAMS = ("io", "ipykernel", "pytest", "absl")


def is_undisturbed(callbacks: CallbackList | None, adapter: keras_private.DataAdapter) -> bool:
    """Tells whether no code of the user runs between the steps of the epoch that begins.

    Args:
        callbacks: The callbacks of the run; None if there are none yet.
        adapter: The data of the run.
    """
    return (
        callbacks is not None
        and keras_private.run_no_code_of_users(callbacks)
        and _has_plain_arrays(adapter)
        and all(
            thread.name.startswith((*_THREADS, keras_private.thread_name_of(callbacks)))
            for thread in threading.enumerate()
        )
        # Threads that `_thread.start_new_thread` started have no name; the main one is not counted.
        and count_threads() < threading.active_count()
        and not any(map(_is_users_handler, signal.valid_signals()))
        and all(map(_is_of_library, gc.callbacks))
        and sys.gettrace() is None
        and sys.getprofile() is None
        # Keras shows its progress by these, or by the handlers of a logger.
        and all(map(_is_plain_stream, (sys.stdout, sys.stderr)))
        and keras.config.is_interactive_logging_enabled()
    )


def may_prefetch(run: TrainerRun, adapter: keras_private.DataAdapter, source: object) -> bool:
    """Tells whether batches may be drawn before the callbacks of the step before have run.

    A loader's own processes draw ahead anyway. Else no callback of the user may act in between, as
    it could change what is drawn; and while a callback saves the state of torch's generator with
    the position in the data, no draw of a batch may change that state.

    Args:
        run: The fit, evaluate or predict.
        adapter: The data of the run.
        source: The batches of the adapter.
    """
    loader = _loader_with_order(source)
    if loader is not None and loader.num_workers > 0:
        return True
    if run.callbacks is None or keras_private.act_between_steps(run.callbacks, run.phase):
        return False
    return run.position is None or (loader is not None and _has_plain_arrays(adapter))


def _loader_with_order(source: object) -> DataLoader[Any] | None:
    """Narrows to a loader whose order torch's own samplers draw, all of it as it begins."""
    if type(source) is not DataLoader:
        return None
    batch_sampler = source.batch_sampler
    samplers = (batch_sampler, getattr(batch_sampler, "sampler", None))
    has_order = all(type(sampler).__module__.startswith("torch.") for sampler in samplers)
    return source if has_order else None


def _has_plain_arrays(adapter: keras_private.DataAdapter) -> bool:
    """Tells whether the data are arrays, none of them of a subclass that runs its own code."""
    arrays = keras_private.arrays_of(adapter)
    return arrays is not None and all(
        type(array) in (np.ndarray, torch.Tensor) for array in keras_private.leaves(arrays)
    )


def _is_users_handler(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    return (
        callable(handler)
        and handler is not signal.default_int_handler
        and not _is_of_library(handler)
    )


def _is_plain_stream(stream: object) -> bool:
    """Tells whether a write into a stream, and into those below it, runs no code of the user."""
    if stream is None:
        return True
    is_own = type(stream).__module__.partition(".")[0].lstrip("_") in _STREAMS
    if not is_own or "write" in getattr(stream, "__dict__", ()):
        return False  # before code of its class is asked for anything
    try:
        return all(_is_plain_stream(getattr(stream, name, None)) for name in ("buffer", "raw"))
    except ValueError:  # of a stream that was detached from its buffer
        return True


def _is_of_library(function: object) -> bool:
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] in _LIBRARIES
