"""What a step reads on the host before it goes on, worked out before it begins."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.constants import varying_memories
from shardcore.adapters.capture.generated import function_of
from shardcore.adapters.capture.tape import Call, Read, Tape, Value, renamed_call
from shardcore.domain.capture import GuardFailed, NotCaptured

Literals = Mapping[int, torch.Tensor]


@attrs.frozen
class Guard:
    """A number that the step read, and what it was when the step was recorded.

    A step that is on its way somewhere, by a count of steps for instance, is recorded for each way.

    Args:
        work_out: Gives the number from the tensors that the step keeps.
        number: What it was.
    """

    work_out: Callable[..., tuple[torch.Tensor, ...]]
    number: Any

    def holds(self, kept: tuple[Any, ...]) -> bool:
        """Whether the next step would read the same."""
        with torch.no_grad():
            (tensor,) = self.work_out(*kept)
        return bool(tensor.item() == self.number)


def guards_of(tape: Tape, literals: Literals) -> tuple[tuple[Guard, ...], tuple[Read, ...]]:
    """What is not the same in every run, of the values that were read.

    Returns:
        A guard for each value that can be worked out before the step, and the reads of the others:
        they hang on the batch, on a draw or on another rank.

    Raises:
        NotCaptured: If one of those others is more than one number.
    """
    varying = varying_memories(tape, set(literals)) if tape.reads else set()
    guards: list[Guard] = []
    others: list[Read] = []
    for read in tape.reads:
        if tape.memory[read.value.number] not in varying:
            continue
        if read.number is None:
            raise NotCaptured(
                f"the step reads values on the host: {read.line}: compute with keras.ops, or read "
                "one number, as by float(x)"
            )
        way = _way_to(read, tape, literals)
        if way is None:
            others.append(read)
        else:
            used = {number: literals[number] for number in way.outside if number in literals}
            guards.append(Guard(function_of(way, used), read.number))
    return tuple(guards), tuple(others)


def check(tensor: torch.Tensor, number: Any) -> None:
    """Go on if `tensor` holds what it held when the step was recorded.

    Raises:
        GuardFailed: If it holds another number.
    """
    if tensor.item() != number:
        raise GuardFailed


def _way_to(read: Read, tape: Tape, literals: Literals) -> Tape | None:
    """The calls, of those before `read`, that its value hangs on; nothing outside is written.

    None where they cannot be run ahead of the step.
    """
    needed = {tape.memory[read.value.number]}
    calls: list[Call] = []
    for call in reversed(tape.calls[: read.place]):
        if tape.writes_of(call) & needed:
            calls.append(call)
            needed |= tape.reads_of(call) | tape.writes_of(call)
    inputs = {tape.memory[value.number] for value in tape.inputs}
    if needed & inputs or not all(map(_may_be_ahead, calls)):
        return None
    return _on_copies(list(reversed(calls)), read, tape, literals)


def _may_be_ahead(call: Call) -> bool:
    operator = call.operator
    return not (
        torch_compat.draws(operator)
        or torch_compat.is_of_collectives(operator)
        or not isinstance(call.result, Value)
    )


def _on_copies(calls: list[Call], read: Read, tape: Tape, literals: Literals) -> Tape | None:
    """The calls as a tape of their own, that writes into copies of what is outside.

    None where several views of one memory would need one copy.
    """
    way = tape.with_calls([])
    written = {tape.memory[value.number] for call in calls for value in call.writes}
    outside = [Value(n) for n in tape.outside if tape.memory[n] in written]
    if len({tape.memory[value.number] for value in outside}) < len(outside):
        return None
    read_of = {value.number for call in calls for value in call.operands} | {read.value.number}
    way.outside = {n: t for n, t in tape.outside.items() if n in read_of or n not in literals}
    names = {value: way.new(tape.form(value)) for value in outside}
    way.calls = [
        *(Call(torch.ops.aten.clone.default, (old,), {}, new) for old, new in names.items()),
        *(renamed_call(call, names) for call in calls),
    ]
    way.inputs, way.outputs = [], (names.get(read.value, read.value),)
    return way
