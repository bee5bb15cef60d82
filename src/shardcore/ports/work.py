"""The watch over the operators of a step that runs on tensors without values."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shardcore.domain.traced_step import Work


class WorkTracer(Protocol):
    """Notes operators with their operations and bytes."""

    def tracing(self) -> AbstractContextManager[Any]:
        """Opens a context in which operators are noted."""

    def updating(self) -> AbstractContextManager[None]:
        """Opens the update of the optimizer."""

    def work(self) -> Sequence[Work]:
        """Returns the operators, equal ones once with their number."""
