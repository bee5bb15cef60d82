"""The watch over the events of a step that runs on tensors without values."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shardcore.domain.explanation.reasons import CollectiveFacts
from shardcore.domain.mesh import Mesh
from shardcore.domain.steps.events import Stored, TracedStep
from shardcore.ports.measurement.memory import MemoryTracer
from shardcore.ports.types import TensorT_contra


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
