"""Whether code of the user may run between two steps of an epoch.

Where it may not, captured steps compare no Python state. What is not known counts as disturbing.
"""

import gc
import signal
import sys
import threading
from _thread import _count as count_threads

import numpy as np
import torch
from keras.callbacks import CallbackList

from shardcore.binding import keras_private

_THREADS = ("MainThread", "shardcore")
_LIBRARIES = ("torch", "keras", "shardcore", "hypothesis")


def is_undisturbed(callbacks: CallbackList | None, adapter: keras_private.DataAdapter) -> bool:
    """Returns whether no code of the user runs between the steps of the epoch that begins.

    Args:
        callbacks: Those of the run; None if there are none yet.
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
    )


def _has_plain_arrays(adapter: keras_private.DataAdapter) -> bool:
    """Returns whether the data are arrays whose classes are NumPy's and torch's own."""
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


def _is_of_library(function: object) -> bool:
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] in _LIBRARIES
