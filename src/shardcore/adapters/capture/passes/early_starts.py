"""Collectives are started before what they need not wait for."""

from collections.abc import Iterable

import attrs

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.passes.liveness import held_bytes, live_bytes
from shardcore.adapters.capture.passes.order import gathering_ranks, gathers, is_view, needs_of
from shardcore.adapters.capture.tape import Call, Tape

# A start overtakes no more calls than a layer has: what those read is kept for a little longer.
FAR = 64


def with_early_starts(tape: Tape, far: int = FAR) -> Tape:
    """Each collective is started as soon as what it sends is there.

    A weight is gathered while the layer before it computes, and an input's gradient is sent while
    that of the kernel is computed: what stands aside for one collective does not for the next,
    under which it is to run. Collectives keep their order, which is that of all ranks. None goes
    where the step would then hold more than it does at its highest; and on a CPU no gather goes
    ahead of who first reads what was gathered before over the same ranks.

    Args:
        tape: A step.
        far: The calls that a start may overtake.
    """
    order = _Order(needs_of(tape))
    live = live_bytes(tape)
    highest = max(live, default=0)
    readers = _first_readers(tape)
    gathered: dict[str, int] = {}
    last = 0
    for place, call in enumerate(tape.calls):
        if not _is_fixed(call, tape):
            continue
        first, held = place, held_bytes(call, tape)
        ranks = gathering_ranks(call, tape)
        farthest = max(place - far, gathered.get(ranks, 0) if gathers(call) else last)
        while first > farthest and live[first - 1] + held <= highest:
            first -= 1
            live[first] += held
        order.add_before(first)
        order.add_with_needs(place)
        last = last if gathers(call) else place
        if ranks:
            gathered[ranks] = readers.get(tape.memory[call.result.number], place)
    order.add_before(len(tape.calls))
    return tape.with_calls(tape.calls[place] for place in order.places)


def _first_readers(tape: Tape) -> dict[int, int]:
    """By memory, the place of the first call that reads it, and does not only look at it."""
    found: dict[int, int] = {}
    for place, call in enumerate(tape.calls):
        if not is_view(call, tape) and not torch_compat.is_wait(call.operator):
            for memory in tape.reads_of(call):
                found.setdefault(memory, place)
    return found


def _is_fixed(call: Call, tape: Tape) -> bool:
    """Whether all ranks must do it in one order: a collective, or what has effects on the host."""
    operator = call.operator
    starts = torch_compat.is_of_collectives(operator) and not torch_compat.is_wait(operator)
    return starts or not tape.writes_of(call)


@attrs.define
class _Order:
    """The places of calls in a new order.

    Args:
        needs: By place, what must come before it.
        places: The order, as far as it is known.
    """

    needs: list[set[int]]
    places: list[int] = attrs.field(factory=list)
    _known: set[int] = attrs.field(factory=set)
    _all_before: int = 0

    def add_before(self, place: int) -> None:
        """All before `place` that are not there yet come next."""
        self._add(range(self._all_before, place))
        self._all_before = max(self._all_before, place)

    def add_with_needs(self, place: int) -> None:
        """What `place` needs, and `place`, come next."""
        found, open_ = {place}, [place]
        while open_:
            new = self.needs[open_.pop()] - self._known - found
            found |= new
            open_ += new
        self._add(sorted(found))

    def _add(self, places: Iterable[int]) -> None:
        new = [place for place in places if place not in self._known]
        self.places += new
        self._known |= set(new)
