"""The tracers of a step that runs on tensors without values: its memory, and its events."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shardcore.domain.explanation.reasons import CollectiveFacts
from shardcore.domain.mesh import Mesh
from shardcore.domain.steps.events import Allocation, Kind, Stored, TracedStep
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


class EventTracer(MemoryTracer[TensorT_contra], Protocol[TensorT_contra]):
    """Notes operators, collectives and memory, each with the block that it belongs to."""

    def updating(self) -> AbstractContextManager[Any]:
        """Opens the update of the optimizer."""

    def block(self, path: str) -> AbstractContextManager[Any]:
        """Opens the call of the block at `path`, which owns its backward pass."""

    def own(self, tensor: TensorT_contra, block: str) -> None:
        """Notes that a tensor that is held belongs to `block`; empty for none."""

    def start(self, facts: CollectiveFacts) -> None:
        """Notes a collective, before it is started."""

    def events(self, mesh: Mesh, stored: Mapping[int, Stored]) -> TracedStep:
        """Returns the step; `stored` has the tensors of variables by their allocations."""
