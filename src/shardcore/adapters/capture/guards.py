"""Guards on the numbers that a step reads on the host, computed before the step begins."""

from collections.abc import Callable
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.constants import varying_memories
from shardcore.adapters.capture.generated import function_of
from shardcore.adapters.capture.rewriting import renamed_call
from shardcore.adapters.capture.tape import Call, Literals, Read, Tape, Value, numbered
from shardcore.domain.capture import GuardFailed, NotCaptured


@attrs.frozen
class Guard:
    """A number that the step reads on the host, with its value in the recording.

    A step that branches on such a number, a step count for instance, has a program per branch.

    Args:
        work_out: Computes the number from the tensors that the step reads from outside.
        number: Its value in the recording.
    """

    work_out: Callable[..., tuple[torch.Tensor, ...]]
    number: Any

    def holds(self, kept: tuple[Any, ...]) -> bool:
        """Returns whether the next step would read the same number."""
        with torch.no_grad():
            (tensor,) = self.work_out(*kept)
        return bool(tensor.item() == self.number)


def guards_of(tape: Tape, literals: Literals) -> tuple[tuple[Guard, ...], tuple[Read, ...]]:
    """Returns the guards of a step, and the reads that no guard can cover.

    A read gets a guard if its value can be computed before the step, and neither if it is the same
    in every run. The others depend on the batch, on a random draw or on another rank.

    Raises:
        NotCaptured: If one of the others reads more than one number.
    """
    varying = varying_memories(tape, literals) if tape.reads else set()
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
    """Checks that `tensor` holds the recorded number.

    Raises:
        GuardFailed: If it holds another number.
    """
    if tensor.item() != number:
        raise GuardFailed


def _way_to(read: Read, tape: Tape, literals: Literals) -> Tape | None:
    """Returns a tape of the calls on which the value of `read` depends.

    It writes into copies of the tensors from outside. None if it cannot run before the step, or if
    several views of one memory would need one copy.
    """
    needed = {tape.memory[read.value.number]}
    calls: list[Call] = []
    for call in reversed(tape.calls[: read.place]):
        if tape.writes_of(call) & needed:
            calls.append(call)
            needed |= tape.reads_of(call) | tape.writes_of(call)
    way = tape.with_calls(reversed(calls))
    written = way.overwritten()
    outside = [numbered(number) for number in tape.outside if tape.memory[number] in written]
    is_viewed = len(tape.memories(outside)) < len(outside)
    if is_viewed or needed & tape.memories(tape.inputs) or not all(map(_may_be_ahead, calls)):
        return None
    read_of = {value.number for call in calls for value in call.operands} | {read.value.number}
    way.outside = {n: t for n, t in tape.outside.items() if n in read_of or n not in literals}
    names = {value: way.new(tape.form(value)) for value in outside}
    way.calls = [
        *(Call(torch.ops.aten.clone.default, (old,), {}, new) for old, new in names.items()),
        *(renamed_call(call, names) for call in way.calls),
    ]
    way.inputs, way.outputs = [], (names.get(read.value, read.value),)
    return way


def _may_be_ahead(call: Call) -> bool:
    sends, draws = torch_private.is_of_collectives, torch_private.draws
    return isinstance(call.result, Value) and not (draws(call.operator) or sends(call.operator))
