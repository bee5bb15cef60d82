"""Copies of batches to a GPU, made while its kernels run (ADR 58)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import keras
import torch

from shardcore.binding import keras_private
from shardcore.domain.scope import Scope

_open = Scope["Transfer | None"]("transfer", default=None)


@attrs.define(eq=False)
class Transfer:
    """The copies of one batch to a GPU, on a stream beside that of the step's kernels.

    Args:
        stream: The stream of the copies.
    """

    stream: torch.cuda.Stream
    _done: torch.cuda.Event | None = attrs.field(default=None, init=False)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Opens the block in which `to_device` copies, and all kernels start on the stream."""
        with _open(self), torch.cuda.stream(self.stream):
            yield
        self._done = self.stream.record_event()

    def wait(self, rows: Any) -> None:
        """Lets kernels that start from now on wait for the copies of `rows`; the host goes on."""
        kernels = torch.cuda.current_stream()
        if self._done is not None:
            kernels.wait_event(self._done)
        for leaf in keras_private.leaves(rows):
            part = leaf.to_local() if hasattr(leaf, "to_local") else leaf
            if isinstance(part, torch.Tensor) and part.is_cuda:
                part.record_stream(kernels)  # its memory is free when these kernels are done

    def finish(self) -> None:
        """Waits until the copies are made: what they were made of may be written to again."""
        if self._done is not None:
            self._done.synchronize()


def stream_of_copies() -> torch.cuda.Stream | None:
    """Makes a stream of the GPU on which Keras computes; None if that is the host."""
    device = torch.device(keras_private.torch_device())
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def to_device(rows: torch.Tensor) -> torch.Tensor:
    """Copies rows of a batch to the GPU if a transfer is open.

    The copy is from pinned memory: from other memory CUDA lets the host wait.
    """
    current = _open.now()
    if current is None or rows.device.type != "cpu":
        return rows
    pinned = rows if rows.is_pinned() else rows.contiguous().pin_memory()
    return pinned.to(current.stream.device, non_blocking=True)


def rows_device() -> Any:
    """The device on which rows are made of arrays: the host if a transfer is open."""
    return keras_private.torch_device() if _open.now() is None else "cpu"


def on_host() -> AbstractContextManager[Any]:
    """Opens the block in which Keras cuts its arrays on the host, if a transfer is open.

    No code of the user may run inside: the weights of its layers are on the GPU.
    """
    return nullcontext() if _open.now() is None else keras.device("cpu")
