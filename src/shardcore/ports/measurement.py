"""The watch over a step: the layer, redistribution and reduction that a thread runs, and tracers.

`adapters.cost` provides the tracers, of a step that runs on tensors without values (ADR 39).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import attrs

from shardcore.domain.cost.events import Allocation, Kind, TracedStep
from shardcore.domain.cost.reasons import CollectiveFacts
from shardcore.domain.cost.step_figures import StepCounts
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.variable_size import ShardedVariable
from shardcore.domain.scope import Scope
from shardcore.ports.types import TensorT_contra

MarkT = TypeVar("MarkT")


@attrs.frozen(eq=False)
class Move:
    """A tensor that is being redistributed."""

    part: Any = attrs.field(repr=False)  # the local shard of this rank
    shape: tuple[int, ...]  # its global shape
    source: Layout  # its layout before
    target: Layout  # its layout after
    to_next: bool = False  # whether each rank sends its part to the next one only


# They belong to the process: torch calls the code that redistributes, or that reduces a bucket of
# gradients, and passes it no argument that names the layer.
# The path of the layer that is being called; empty outside, as in a backward pass.
layer_scope = Scope("layer", default="")
# The redistribution whose collectives are started.
redistribution_scope = Scope[Move | None]("move", default=None)
# The parameters whose gradients, or new values, are reduced together.
reduction_scope = Scope[Sequence[Any]]("reduced", default=())
# Whether each gradient is reduced by itself: a trace forms the buckets afterwards.
gradients_apart_scope = Scope("gradients_apart", default=False)


class CollectiveTracer(Protocol):
    """A tracer, which gets the collectives of this thread, each before it is started."""

    def tracing(self) -> AbstractContextManager[None]:
        """Opens a scope in which collectives are traced."""

    def layer(self, layer: str) -> AbstractContextManager[None]:
        """Opens the scope of a call of the layer at the path `layer`, with its backward pass."""


# Makes a tracer that calls the first argument; the second has the variables, tensors by path.
TracerFactory = Callable[[Callable[[CollectiveFacts], None], Mapping[str, Any]], CollectiveTracer]


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
        """Lists all that was noted."""


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

    def events(self, mesh: Mesh, stored: Mapping[int, ShardedVariable]) -> TracedStep:
        """Collects the step; `stored` has the tensors of variables by their allocations."""


class StepCounter(Protocol):
    """A counter of what a step sends and computes."""

    @property
    def counts(self) -> StepCounts:
        """The sums so far."""


class StepMeasure(Protocol[MarkT]):
    """A watch over running steps on the device of this rank."""

    def mark(self) -> MarkT:
        """Marks the end of all work that was started so far, without waiting for it."""

    def seconds(self, begin: MarkT, end: MarkT) -> float:
        """The seconds between two marks. It waits for the later one."""

    def peak_memory(self) -> int:
        """The most bytes of memory so far: of the device, or of the process on a CPU."""

    def peak_flops(self, dtype: str) -> float | None:
        """The operations of the device in a second with numbers of `dtype`; None if unknown."""

    def counting(self) -> AbstractContextManager[StepCounter]:
        """Opens a context in which each operator of this thread is counted, which takes time."""
