"""What a step reads on the host before it goes on, worked out before it begins."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.constants import varying_memories
from shardcore.adapters.capture.graph import graph_of
from shardcore.adapters.capture.tape import Call, Read, Tape, Value, renamed
from shardcore.domain.capture import NotCaptured

Literals = Mapping[int, torch.Tensor]


@attrs.frozen
class Guard:
    """A number that the step read, and what it was when the step was recorded.

    A step that is on its way somewhere, by a count of steps for instance, is recorded for each way.

    Args:
        work_out: Gives the number from the tensors that the step keeps.
        number: What it was.
    """

    work_out: Callable[..., tuple[torch.Tensor]]
    number: Any

    def holds(self, kept: tuple[Any, ...]) -> bool:
        """Whether the next step would read the same."""
        with torch.no_grad():
            (tensor,) = self.work_out(*kept)
        return bool(tensor.item() == self.number)


def guards_of(tape: Tape, literals: Literals) -> tuple[Guard, ...]:
    """A guard for each value that was read, and that is not the same in every run.

    Raises:
        NotCaptured: If one hangs on the batch, on a draw or on another rank.
    """
    varying = varying_memories(tape, set(literals)) if tape.reads else set()
    return tuple(
        _guard(read, tape, literals)
        for read in tape.reads
        if tape.memory[read.value.number] in varying
    )


def _guard(read: Read, tape: Tape, literals: Literals) -> Guard:
    way = _way_to(read, tape, literals)
    used = {number: literals[number] for number in way.outside if number in literals}
    return Guard(graph_of(way, used).forward, read.number)


def _way_to(read: Read, tape: Tape, literals: Literals) -> Tape:
    """The calls, of those before `read`, that its value hangs on; nothing outside is written."""
    needed = {tape.memory[read.value.number]}
    calls: list[Call] = []
    for call in reversed(tape.calls[: read.place]):
        if tape.writes_of(call) & needed:
            calls.append(call)
            needed |= tape.reads_of(call) | tape.writes_of(call)
    inputs = {tape.memory[value.number] for value in tape.inputs}
    if read.number is None or needed & inputs or not all(map(_may_be_ahead, calls)):
        raise NotCaptured(f"the step reads values on the host: {read.line}")
    return _on_copies(list(reversed(calls)), read, tape, literals)


def _may_be_ahead(call: Call) -> bool:
    operator = call.operator
    return not (
        torch_compat.draws(operator)
        or torch_compat.is_of_collectives(operator)
        or not isinstance(call.result, Value)
    )


def _on_copies(calls: list[Call], read: Read, tape: Tape, literals: Literals) -> Tape:
    """The calls as a tape of their own, that writes into copies of what is outside."""
    way = tape.with_calls([])
    written = {tape.memory[value.number] for call in calls for value in call.writes}
    outside = [Value(n) for n in tape.outside if tape.memory[n] in written]
    if len({tape.memory[value.number] for value in outside}) < len(outside):
        raise NotCaptured(f"the step reads values on the host: {read.line}")  # views of one memory
    read_of = {value.number for call in calls for value in call.operands} | {read.value.number}
    way.outside = {n: t for n, t in tape.outside.items() if n in read_of or n not in literals}
    names = {value: way.new(tape.form(value)) for value in outside}
    way.calls = [
        *(Call(torch.ops.aten.clone.default, (old,), {}, new) for old, new in names.items()),
        *(_renamed(call, names) for call in calls),
    ]
    way.inputs, way.outputs = [], (names.get(read.value, read.value),)
    return way


def _renamed(call: Call, names: dict[Value, Value]) -> Call:
    args, kwargs = renamed((call.args, call.kwargs), names)
    return attrs.evolve(call, args=args, kwargs=kwargs, result=renamed(call.result, names))
