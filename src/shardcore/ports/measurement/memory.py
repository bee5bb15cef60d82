"""The watch over the memory of a step that runs on tensors without values."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shardcore.domain.steps.memory import Allocation, Kind
from shardcore.ports.types import TensorT_contra


class MemoryTracer(Protocol[TensorT_contra]):
    """A tracer of memory: each allocation, and when it is free again."""

    def without_values(self) -> AbstractContextManager[Any]:
        """Opens the context in which tensors have shapes and no values, and nothing is computed.

        It may be opened several times, one after the other.
        """

    def tracing(self) -> AbstractContextManager[None]:
        """Opens a context in which the results of operators are noted."""

    def hold(self, tensor: TensorT_contra, kind: Kind) -> int:
        """Notes the memory of a plain tensor and its use; a known tensor gets the new use.

        Returns:
            The number of its allocation.
        """

    def allocations(self) -> Sequence[Allocation]:
        """Returns all that was noted."""
