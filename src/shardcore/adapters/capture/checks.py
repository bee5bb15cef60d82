"""Checks within a program: it goes on if the step reads the recorded numbers on the host.

If not, the writes of this run are undone, and the step is as if it had not begun.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from shardcore.adapters.capture.guards import check
from shardcore.adapters.capture.tape import Call, Read, Tape
from shardcore.domain.capture import GuardFailed, NotCaptured

# The most bytes that a run may write before its last check: they are copied at each run.
_MOST_BYTES = 64 * 2**20


def with_checks(tape: Tape, reads: Sequence[Read]) -> Tape:
    """Returns `tape` with a check for each of `reads`, at the place of the read."""
    calls = list(tape.calls)
    for read in sorted(reads, key=lambda each: each.place, reverse=True):
        calls.insert(read.place, Call(check, (read.value, read.number), {}, None, (), read.line))
    return tape.with_calls(calls)


def rollback_of(tape: Tape, kept: Sequence[Any]) -> "Rollback":
    """Returns the rollback of the writes before the last check; empty in a step without checks.

    Raises:
        NotCaptured: If it writes too much before its last check.
    """
    checks = [place for place, call in enumerate(tape.calls) if call.operator is check]
    last = max(checks, default=0)
    before = tape.calls[:last]
    memories = set[int]().union(*map(tape.writes_of, before))
    inputs = tuple(n for n, each in enumerate(tape.inputs) if tape.memory[each.number] in memories)
    ours = set(map(id, kept))
    written = tuple(
        tensor
        for number, tensor in tape.outside.items()
        if tape.memory[number] in memories and id(tensor) in ours
    )
    if (size := sum(each.nbytes for each in written)) > _MOST_BYTES:
        line = tape.calls[last].line
        raise NotCaptured(
            f"after it has written {size} bytes it reads values on the host: {line}: read them "
            "earlier in the step"
        )
    draws = any(call.draws for call in before)
    return Rollback(inputs, written, draws)


@attrs.frozen
class Rollback:
    """Undoes the writes of a run if a check fails.

    Args:
        inputs: The places of the inputs that the program writes into before its last check.
        written: The tensors of the model that it writes into before.
        draws: Whether it draws from torch's generator before.
    """

    inputs: tuple[int, ...]
    written: tuple[torch.Tensor, ...]
    draws: bool

    @contextmanager
    def around(self, inputs: Sequence[Any]) -> Iterator[None]:
        """Undoes the run inside, with these inputs, if a check fails.

        Raises:
            GuardFailed: If a check fails; all is then as before.
        """
        written = [*(inputs[n] for n in self.inputs), *self.written]
        before = [each.detach().clone() for each in written]
        states = _generator_states() if self.draws else []
        try:
            yield
        except GuardFailed:
            for tensor, value in zip(written, before, strict=True):
                tensor.detach().copy_(value)
            for state in states[:1]:
                torch.set_rng_state(state)
            for state in states[1:]:
                torch.cuda.set_rng_state(state)
            raise


def _generator_states() -> list[torch.Tensor]:
    """Returns the states of torch's generators: of the CPU, and of the GPU if there is one."""
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *on_gpu]
