"""Captured steps: the trace of one step, and the program made of two traces."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import attrs

from shardcore.domain.cost.events import Allocation
from shardcore.domain.cost.step_figures import StepCounts
from shardcore.ports.types import TensorT_contra


@attrs.frozen
class StartedCollective:
    """A collective of a program.

    Args:
        kind: "all_reduce", "all_gather", ...; the same on all ranks of the group.
        group: The name of its group of ranks.
        elements: The elements of its operands, the same on all those ranks; 0 if they may differ.
    """

    kind: str
    group: str
    elements: int


@attrs.frozen
class RecordedSum:
    """An all-reduce of a recorded step.

    Args:
        bytes: The bytes of its operand.
        calls: The number of calls before it. Ranks may have other numbers: one fills a tensor with
            zeros for which another has the values.
    """

    bytes: int
    calls: int


RecordedSums: TypeAlias = tuple[RecordedSum, ...]


class Observer(Protocol):
    """Notes the functions that this thread calls while it is enabled, such as a profile."""

    def enable(self) -> None:
        """Begins to note functions."""

    def disable(self) -> None:
        """Notes no functions until it is enabled again."""


class StepTrace(Protocol):
    """The trace of one run of a step."""

    @property
    def refusal(self) -> str:
        """The reason why no program can be made of it; empty if one can."""

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The numbers that the step read on the host, which its Python may have branched on."""

    @property
    def last_read(self) -> str:
        """The operator that read the last of these numbers, and its line of Python."""

    @property
    def all_reduces(self) -> RecordedSums:
        """The all-reduces of this rank, in order."""


class Program(Protocol):
    """A step that runs without the Python code that was recorded."""

    @property
    def captured_inputs(self) -> Sequence[Any]:
        """The tensors and generators from outside that it reads."""

    @property
    def collectives(self) -> Sequence[StartedCollective]:
        """Its collectives, in order."""

    @property
    def counts(self) -> StepCounts:
        """The bytes that a run of it sends on this rank, and the operations that it computes."""

    @property
    def remark(self) -> str:
        """The reason why it is not compiled although that was asked for; else empty."""

    def __call__(self, inputs: Sequence[object], *, owned: bool = False) -> Any:
        """Runs the step on a batch of these plain tensors, and returns what the step returns.

        Args:
            inputs: The tensors.
            owned: Whether the donated inputs are results of the last run, which the caller gives
                away: it may overwrite them. Its results may be inference tensors then.

        Raises:
            GuardFailed: If the step reads other numbers on the host; nothing is done then.
        """


class StepCapture(Protocol[TensorT_contra]):
    """A recorder of steps, and the compiler of their programs."""

    def record(
        self,
        step: Callable[[], object],
        inputs: Sequence[TensorT_contra],
        observer: Observer,
        donated: int = 0,
    ) -> tuple[Any, StepTrace]:
        """Runs `step` and records it.

        Args:
            step: Returns a nest of plain tensors.
            inputs: The plain tensors of its batch.
            observer: Enabled while the step's functions run, and not while one is recorded.
            donated: The number of the first inputs that the first results replace.

        Returns:
            The result of `step`, and the trace.
        """

    def record_without_values(
        self, step: Callable[[], object], inputs: Sequence[TensorT_contra], observer: Observer
    ) -> StepTrace:
        """Records `step` on tensors that have shapes and no values: nothing is written or sent.

        Args:
            step: Returns a nest of plain tensors.
            inputs: The plain tensors of its batch.
            observer: Enabled while the step's functions run.
        """

    def allocations(
        self,
        step: Callable[[], object],
        inputs: Sequence[TensorT_contra],
        gradients: Callable[[], Iterable[TensorT_contra]],
        within: AbstractContextManager[object],
    ) -> Sequence[Allocation]:
        """Lists the memory that a run of a program of `step` takes, without its inputs.

        Args:
            step: Returns a nest of plain tensors.
            inputs: The plain tensors of its batch, without values.
            gradients: Returns the gradients of variables after the step.
            within: The open context without values; see `ports.measurement.MemoryTracer`.

        Raises:
            NotCaptured: If the step has no program.
        """

    @property
    def at_once(self) -> bool:
        """Whether steps are recorded from the first one on, whether it pays or not."""

    @property
    def audit_interval(self) -> int:
        """One in so many captured steps is audited; 0 if none is."""

    def audit(
        self,
        step: Callable[[], object],
        inputs: Sequence[TensorT_contra],
        programs: Sequence[Program],
    ) -> Any:
        """Runs `step` eagerly, and checks that one of `programs` would do the same.

        Args:
            step: Returns a nest of plain tensors.
            inputs: The plain tensors of its batch.
            programs: Those of the step: they differ in the numbers that it reads on the host.

        Raises:
            AuditError: If it runs as none of them, with numbers that one of them has read.
        """

    def program(
        self,
        earlier: StepTrace | Program | None,
        trace: StepTrace,
        *,
        compiled: bool = False,
        all_reduces: Sequence[RecordedSum] | None = None,
    ) -> Program:
        """Makes a program of two runs that did the same.

        Args:
            earlier: An earlier run, or the program of runs with batches of another size; None for
                a program that runs this one step only.
            trace: A later run, which did the same.
            compiled: Whether Inductor compiles the program, if it can.
            all_reduces: The all-reduces that all ranks assume to fill the buckets. Needed where
                ranks have shards of different sizes, or another number of calls, and so would not
                start the same collectives.

        Raises:
            TracesDiffer: If the runs differ.
            NotCaptured: If the step cannot be run from a trace.
        """

    def is_recording(self) -> bool:
        """Tells whether a step is being recorded."""

    def hooks_of(self, module: object) -> list[Any]:
        """Lists the hooks of a torch module, of its forward and of its backward pass."""

    def active_mode(self) -> str:
        """Names a mode that this thread is in and that a program would not call.

        Empty without one.
        """

    def hook_registries(self) -> list[dict[int, Any]]:
        """The dicts of the hooks that all torch modules call."""

    @property
    def metadata_of(self) -> Callable[[Any], tuple[Any, ...]]:
        """Reads what changes of a tensor without an operator: its gradient's flag, its hooks."""

    @property
    def dict_version(self) -> Callable[[dict[Any, Any]], int]:
        """Numbers the states of a dict: as long as it is not changed, its number is the same."""

    def generator(self, seed: TensorT_contra) -> Any:
        """Makes a random generator, seeded with the value of the plain tensor `seed`."""

    def drawn(
        self, draw: Callable[..., object], seed: TensorT_contra, operands: dict[str, object]
    ) -> Any:
        """Draws random values by one call of the trace.

        Args:
            draw: Seeds torch's default generator, draws, and restores the generator. It takes
                `operands` by name, and `seed`, a number.
            seed: A plain tensor with that number.
            operands: Plain tensors, and constants whose `repr` is a Python literal.
        """

    def recomputation(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Makes the contexts of a forward pass that begins now, and of its recomputations.

        All draw the same random values. A step is being recorded.
        """
