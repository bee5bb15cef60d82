"""Records the trace of a step that computes nothing: its tensors have shapes, and no values."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from shardcore.adapters import torch_private
from shardcore.adapters.capture.recording import functions
from shardcore.adapters.capture.recording.recorder import Recorder
from shardcore.adapters.torch_private import Args, Kwargs
from shardcore.ports.capture import Observer


class RecorderWithoutValues(Recorder):
    """Records one run of a step without values: no memory is taken, nothing is written or sent.

    The trace reads the same tensors from outside as that of a run that computes. A step that needs
    a value, to read a number on the host or for the shape of a result, raises what torch raises.

    Args:
        inputs: The plain tensors of the batch.
        observer: Enabled while functions of the step run.
        within: The open context of the inputs, if they have no values either.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        observer: Observer | None = None,
        within: torch_private.WithoutValues | None = None,
    ) -> None:
        self._without_values = within or torch_private.WithoutValues()
        self._is_open = within is not None
        super().__init__(inputs, observer)

    def _listener(self, unobserved: functions.Unobserved) -> AbstractContextManager[Any]:
        contexts = ExitStack()
        if not self._is_open:
            contexts.enter_context(self._without_values)
        contexts.enter_context(
            torch_private.OperatorListener(self._begin, self._end, unobserved, values=False)
        )
        return contexts

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses the recording; operators compute with values."""
        with super().paused(), self._without_values.paused():
            yield

    def _compute(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        return self._without_values.call_with_values(function, args, kwargs)
