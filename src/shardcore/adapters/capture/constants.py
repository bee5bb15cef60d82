"""What in a tape is the same in every run: numbers of the program, and what is made of them."""

from collections.abc import Collection, Mapping
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Tape, Value, values
from shardcore.domain.capture import NotCaptured, RecordingsDiffer


def literals(first: Tape, second: Tape) -> dict[int, torch.Tensor]:
    """By number, the tensors that Python made anew, with the same values, in both runs of a step.

    Raises:
        NotCaptured: If one had other values each time.
    """
    found = {}
    written = second.overwritten()
    for number, value in second.outside.items():
        before = first.outside[number]
        if _is_same(before, value):
            continue
        kept = second.found.get(number)
        if kept is None and second.memory[number] not in written:
            # Of two large tensors in one buffer it is not known what that held before.
            kept = value if before.data_ptr() != value.data_ptr() else None
        if kept is None or not _are_equal(first.found.get(number, before), kept):
            raise NotCaptured(
                f"{_reader(second, number)} reads what Python made anew, with other values, in "
                "each step: pass it in the batch, or keep it in a variable"
            )
        found[number] = kept
    return found


@attrs.frozen
class Pattern:
    """The port `Pattern`: calls without their numbers, and what they read that was there before.

    Args:
        calls: Operators, with the values that they read and write.
        kept: By number, the tensors and generators that each run reads.
        literals: The numbers of constants.
    """

    calls: tuple[Any, ...]
    kept: Mapping[int, Any]
    literals: frozenset[int]

    @classmethod
    def of(cls, tape: Tape, literals: Collection[int]) -> "Pattern":
        """Returns the pattern of `tape`."""
        kept = {n: each for n, each in tape.outside.items() if n not in literals}
        return cls(_calls(tape), kept, frozenset(literals))

    def literals_of(self, tape: Tape) -> dict[int, torch.Tensor]:
        """Returns the constants of a run with batches of another size, by number.

        Raises:
            RecordingsDiffer: If `tape` has another pattern.
        """
        is_same_step = self.calls == _calls(tape) and all(
            _is_same(value, tape.outside[number]) for number, value in self.kept.items()
        )
        if not is_same_step or not self.literals <= tape.found.keys():
            raise RecordingsDiffer("it has other operators than with batches of another size")
        return {number: tape.found[number] for number in self.literals}


def _calls(tape: Tape) -> tuple[Any, ...]:
    calls = [(each.operator, each.operands, each.results, each.writes) for each in tape.calls]
    reads = [read.value for read in tape.reads]
    return (*calls, tape.inputs, reads, tape.outside.keys(), values(tape.outputs))


def _is_same(before: object, now: object) -> bool:
    """Whether it is one tensor, or one generator, in both runs."""
    if isinstance(before, torch.Generator) and isinstance(now, torch.Generator):
        return torch_compat.identity_of(before) == torch_compat.identity_of(now)
    return before is now


def _are_equal(first: object, second: object) -> bool:
    return (
        isinstance(first, torch.Tensor)
        and isinstance(second, torch.Tensor)
        and first.shape == second.shape
        and first.dtype == second.dtype
        and bool(((first == second) | ((first != first) & (second != second))).all())
    )


def varying_memories(tape: Tape, literal: Collection[int]) -> set[int]:
    """Returns the memories whose values may be others in the next run."""
    outside = (Value(number) for number in tape.outside if number not in literal)
    varying = tape.memories((*tape.inputs, *outside))
    grown = True
    while grown:  # a write may come after what was read of it
        before = len(varying)
        for call in tape.calls:
            if torch_compat.draws(call.operator) or tape.reads_of(call) & varying:
                varying |= tape.writes_of(call)
        grown = len(varying) > before
    return varying


def _reader(tape: Tape, number: int) -> str:
    for call in tape.calls:
        if Value(number) in call.operands:
            return f"{call.operator} at {call.line}"
    return "the step"
