"""What the binding needs to capture steps: a recording of one, and a program made of two."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs


@attrs.frozen
class StartedCollective:
    """A collective of a program.

    Args:
        kind: What all ranks must start as the same one of their collectives.
        group: Names the ranks that it joins.
        elements: The size of its operands, that all those ranks must have; 0 where they may differ.
    """

    kind: str
    group: str
    elements: int


class Recording(Protocol):
    """What one run of a step did."""

    @property
    def refusal(self) -> str:
        """Why the step cannot be run from it, empty if it can."""

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The numbers that it read on the host: a step that reads others may do something else."""

    @property
    def last_read(self) -> str:
        """The operator that read the last of them, and its line of Python."""

    @property
    def all_reduce_bytes(self) -> tuple[int, ...]:
        """The bytes of each all-reduce, in order."""


class Pattern(Protocol):
    """What the recordings of a step have in common, whatever the sizes of its batches."""


class Program(Protocol):
    """A step that runs without the Python that it was made of."""

    @property
    def pattern(self) -> Pattern:
        """The pattern of its recordings."""
        ...

    @property
    def kept(self) -> Sequence[Any]:
        """The tensors and generators that it reads, and that were there before it."""

    @property
    def collectives(self) -> Sequence[StartedCollective]:
        """The collectives that it starts, in order."""

    @property
    def remark(self) -> str:
        """Why it is not compiled, though that was asked for; else empty."""

    def fits(self) -> bool:
        """Whether the next step reads on the host what this one was recorded with."""

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """What the step returns for a batch of these plain tensors."""


class StepCapture(Protocol):
    """Makes programs of steps."""

    def record(self, step: Callable[[], Any], inputs: Sequence[Any]) -> tuple[Any, Recording]:
        """Run `step` as ever, and tell what it did.

        Args:
            step: Returns a nest of plain tensors.
            inputs: The plain tensors of its batch.
        """

    def program(
        self,
        earlier: Recording | Pattern,
        recording: Recording,
        *,
        compiled: bool = False,
        most_bytes: Sequence[int] | None = None,
    ) -> Program:
        """Returns the program of a step.

        Args:
            earlier: An earlier run, or the pattern of runs with batches of another size.
            recording: What the step did, which must be the same.
            compiled: Whether the program is compiled by Inductor, if it can be.
            most_bytes: Where ranks have shards of other sizes, and would not start the same: the
                bytes of each all-reduce by which all of them decide what goes into one bucket.

        Raises:
            RecordingsDiffer: If the runs differ.
            NotCaptured: If there is something that cannot be run again.
        """

    def is_recording(self) -> bool:
        """Whether a step is being recorded."""

    def hooks_of(self, module: Any) -> list[Any]:
        """What a torch module calls beside its own `forward`, in either direction."""

    def generator(self, seed: Any) -> Any:
        """A random generator with the value of the plain tensor `seed`."""

    def drawn(self, draw: Callable[..., Any], seed: Any, operands: dict[str, Any]) -> Any:
        """What a function draws that seeds torch's own generator and puts it back, in a recording.

        Args:
            draw: Takes `operands` by name, and `seed`, a number.
            seed: A plain tensor with that number.
            operands: Plain tensors, and what is written as Python writes it.
        """
