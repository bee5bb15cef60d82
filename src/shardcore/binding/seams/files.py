"""Keras' functions that write files and print messages."""

from contextlib import closing
from typing import Any

from keras.src import backend
from keras.src.callbacks import remote_monitor
from keras.src.saving import saving_lib
from keras.src.utils import file_utils, io_utils


class _NoFile(saving_lib.H5IOStore):  # type: ignore[misc]
    """A store that gathers each value for the rank that writes, and stores none."""

    def __init__(self) -> None:
        self.archive = None

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> "_NoFile":
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        backend.convert_to_numpy(value)

    def close(self) -> None:
        pass


def gather_model(model: Any) -> None:
    """Visits the config and the state of `model` as saving does, and writes nothing."""
    saving_lib._serialize_model_as_json(model)
    gather_state(model)


def gather_state(model: Any, objects_to_skip: Any = None) -> None:
    """Visits the state of `model` as saving does, in the same order, and writes nothing."""
    with closing(saving_lib.DiskIOStore("assets", mode="w")) as scratch:
        saving_lib._save_state(
            model,
            weights_store=_NoFile(),
            assets_store=scratch,
            inner_path="",
            visited_saveables={id(each) for each in objects_to_skip or ()},
        )


def can_send() -> bool:
    """Returns whether `requests`, which `RemoteMonitor` needs, is installed."""
    return remote_monitor.requests is not None


def print_message(message: str) -> None:
    """Prints as Keras does, to standard output or to its log."""
    io_utils.print_msg(message)


def is_remote(path: str) -> bool:
    """Returns whether Keras writes `path` by a remote file system."""
    return bool(file_utils.is_remote_path(path)) or path.startswith("hf://")
