"""Steps as programs: recorded twice, and run from the tape if both runs were the same."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture import compilation, constants, passes, seeds
from shardcore.adapters.capture.checks import (
    rollback_of,
    with_checks,
    with_waits_before_checks,
)
from shardcore.adapters.capture.generated import function_of
from shardcore.adapters.capture.guards import guards_of
from shardcore.adapters.capture.passes.kept_buckets import Memories, with_kept_buckets
from shardcore.adapters.capture.recorded_program import RecordedProgram
from shardcore.adapters.capture.recorder import Recorder, recording
from shardcore.adapters.capture.tape import Tape, difference, values
from shardcore.domain.capture import NotCaptured, RecordingsDiffer
from shardcore.ports.capture import Pattern, Recording, StartedCollective


class TapeCapture:
    """The port `StepCapture`: programs are functions that are generated of tapes."""

    def __init__(self) -> None:
        self._memories = Memories()
        self._onednn = torch_compat.OneDnn()

    def close(self) -> None:
        """Take back what torch was told; programs that were made run no more."""
        self._onednn.close()

    def record(self, step: Callable[[], Any], inputs: Sequence[Any]) -> tuple[Any, Tape]:
        """Run `step` while its tape is written."""
        recorder = Recorder(inputs)
        return recorder.run(step), recorder.tape

    def program(
        self,
        earlier: Recording | Pattern,
        recording: Recording,
        *,
        compiled: bool = False,
        most_bytes: Sequence[int] | None = None,
    ) -> RecordedProgram:
        """Returns the program of `recording`, if the earlier one is the same."""
        assert isinstance(recording, Tape)
        tape = recording
        if isinstance(earlier, constants.Pattern):
            literals = earlier.literals_of(tape)
        else:
            assert isinstance(earlier, Tape)
            if differs := difference(earlier, tape):
                raise RecordingsDiffer(differs)
            literals = constants.literals(earlier, tape)
        if tape.draws_on_host:
            raise NotCaptured(
                "Python or NumPy draws random numbers in it: draw by keras.random, with a "
                "SeedGenerator of the layer"
            )
        alike = most_bytes is not None
        if most_bytes is not None:
            tape = _with_bytes(tape, most_bytes)
        guards, reads = guards_of(tape, literals)
        tape = with_checks(tape, reads)
        as_compiled = compiled or tape.reshapes
        better = passes.improved(tape, alike=alike, compiled=as_compiled)
        if not as_compiled:
            better = with_kept_buckets(better, self._memories)
        better = with_waits_before_checks(better)
        kept = tuple(value for number, value in tape.outside.items() if number not in literals)
        run = function_of(better, literals)
        collectives, rollback = tuple(started(better)), rollback_of(better, kept)
        pattern = constants.Pattern.of(recording, literals)
        program = RecordedProgram(run, kept, tape.outputs, pattern, guards, collectives, rollback)
        if compiled:
            return compilation.compiled(program, better, literals, self._onednn)
        return program

    def is_recording(self) -> bool:
        """Whether a tape is being written."""
        return recording() is not None

    def hooks_of(self, module: torch.nn.Module) -> list[Any]:
        """What a torch module calls beside its own `forward`, in either direction."""
        return torch_compat.hooks_of(module)

    def generator(self, seed: torch.Tensor) -> torch.Generator:
        """A generator whose seed is part of the recording."""
        return seeds.generator(seed)

    def drawn(self, draw: Callable[..., Any], seed: torch.Tensor, operands: dict[str, Any]) -> Any:
        """A draw whose seed is part of the recording."""
        return seeds.drawn(draw, seed, operands)


def started(tape: Tape) -> Iterator[StartedCollective]:
    """Yields the collectives of `tape`, in order."""
    for call in tape.calls:
        if torch_compat.is_collective(call.operator):
            *operands, group = call.args  # the group's name is another one on other ranks
            plain = [each for each in operands if isinstance(each, str | int)]
            # An all-to-all has a list of sizes: ranks may send more or less.
            may_differ = any(isinstance(each, list) and not values(each) for each in operands)
            tensors = list(call.operands)
            elements = 0 if may_differ else sum(tape.form(each).elements for each in tensors)
            # Whether it writes where its operand was may differ between ranks.
            name = torch_compat.collective_name(call.operator)
            yield StartedCollective(f"{name} of {len(tensors)}, {plain}", str(group), elements)


def _with_bytes(tape: Tape, most_bytes: Sequence[int]) -> Tape:
    """Returns `tape` with these bytes of its all-reduces."""
    bytes_of = iter(most_bytes)
    return tape.with_calls(
        attrs.evolve(call, sends=next(bytes_of))
        if torch_compat.is_all_reduce(call.operator)
        else call
        for call in tape.calls
    )
