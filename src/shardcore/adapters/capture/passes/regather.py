"""A weight that is gathered for the forward pass is gathered anew for the backward pass."""

from bisect import bisect
from collections.abc import Iterable

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.passes.order import gathers, is_view
from shardcore.adapters.capture.tape import Call, Tape, Value, renamed, values


def with_regathers(tape: Tape) -> Tape:
    """What the backward pass reads of a gathered weight is gathered before the first such call.

    In between it is not kept. One that the backward pass reads before others are gathered is.
    """
    found = tape.with_calls([])
    steps = _Steps.of(tape)
    calls = list(tape.calls)
    again: dict[int, list[Call]] = {}
    for place in steps.gathers:
        if calls[place].backward:
            continue
        made_by, last_use, readers = steps.uses(place)
        if readers and steps.is_far(last_use, readers[0]) and steps.may_repeat(made_by, readers[0]):
            names, repeated = _repeated((tape.calls[each] for each in made_by), found)
            again.setdefault(readers[0], []).extend(repeated)
            for reader in readers:
                args, kwargs = renamed((calls[reader].args, calls[reader].kwargs), names)
                calls[reader] = attrs.evolve(calls[reader], args=args, kwargs=kwargs)
    found.calls = [
        each for place, call in enumerate(calls) for each in (*again.get(place, ()), call)
    ]
    return found


@attrs.frozen
class _Steps:
    """A tape, with who makes and reads what in it.

    Args:
        tape: The step.
        operands: By place, what the call there reads.
        makers: By value, the place of the call that makes it.
        gathers: The places of gathers.
    """

    tape: Tape
    operands: list[set[Value]]
    makers: dict[Value, int]
    gathers: list[int]

    @classmethod
    def of(cls, tape: Tape) -> "_Steps":
        makers: dict[Value, int] = {}
        for place, call in enumerate(tape.calls):
            for value in call.results:
                if value not in call.writes:
                    makers.setdefault(value, place)
        places = [place for place, call in enumerate(tape.calls) if gathers(call)]
        return cls(tape, [set(call.operands) for call in tape.calls], makers, places)

    def uses(self, gather: int) -> tuple[list[int], int, list[int]]:
        """Of the weight that is gathered there, and of what is the same, moved in memory.

        Returns:
            The places of the calls that make what the backward pass reads of it; of the last call
            before that pass that reads it; and of those in that pass.
        """
        made = set(values(self.tape.calls[gather].result))
        readers, last_use = [], gather
        for place in range(gather + 1, len(self.operands)):
            call = self.tape.calls[place]
            if not self.operands[place] & made or torch_compat.is_wait(call.operator):
                continue
            if call.backward:
                readers.append(place)
            elif self.operands[place] <= made and _moves(call):
                made |= set(call.results)
            else:
                last_use = place
        read = {value for place in readers for value in self.operands[place] & made}
        return self._making(read), last_use, readers

    def _making(self, read: set[Value]) -> list[int]:
        """The places of all calls that `read` hangs on."""
        found: set[int] = set()
        open_ = list(read)
        while open_:
            place = self.makers.get(open_.pop())
            if place is not None and place not in found:
                found.add(place)
                open_ += self.operands[place]
        return sorted(found)

    def is_far(self, last_use: int, reader: int) -> bool:
        """Whether others are gathered between two places."""
        return bisect(self.gathers, last_use) < bisect(self.gathers, reader)

    def may_repeat(self, places: list[int], reader: int) -> bool:
        """Whether these calls only move what was there before, and it is the same at `reader`."""
        calls = [self.tape.calls[place] for place in places]
        touched = set[int]().union(
            *map(self.tape.reads_of, calls), *map(self.tape.writes_of, calls)
        )
        inputs = {self.tape.memory[value.number] for value in self.tape.inputs}
        between = self.tape.calls[places[0] : reader]
        written = {self.tape.memory[value.number] for call in between for value in call.writes}
        moves = all(_moves(call) or gathers(call) for call in calls)
        return moves and not touched & (written | inputs)


def _repeated(calls: Iterable[Call], found: Tape) -> tuple[dict[Value, Value], list[Call]]:
    """`calls` once more, and by the values that they made those that they make now, in `found`."""
    names: dict[Value, Value] = {}
    repeated = []
    for call in calls:
        shares = is_view(call, found)
        for value in call.results:
            memory = found.memory[value.number]
            owner = names.get(Value(memory), Value(memory)).number
            names[value] = found.new(found.form(value), owner if shares else None)
        args, kwargs = renamed((call.args, call.kwargs), names)
        result = renamed(call.result, names)
        repeated.append(attrs.evolve(call, args=args, kwargs=kwargs, result=result, backward=True))
        if gathers(call):
            repeated.append(Call(torch_compat.wait_for(), (result,), {}, result))
    return names, repeated


def _moves(call: Call) -> bool:
    """Whether the results are the operands, elsewhere or otherwise in memory."""
    operator = call.operator
    return operator in _MOVES or getattr(operator, "is_view", False)


_MOVES = {
    torch_compat.TO_COPY,
    torch.ops.aten.cat.default,
    torch.ops.aten.chunk.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.pad.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
}
