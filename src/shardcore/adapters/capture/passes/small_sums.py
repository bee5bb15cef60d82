"""Moves the all-reduces of a few numbers, of losses and metrics, to the end of the step."""

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.analyses import needs_of
from shardcore.adapters.capture.guards import check
from shardcore.adapters.capture.tape import Call, Tape

# The elements of a tensor that is small: a loss, a count, the counts of some classes.
SMALL = 64


def with_small_sums_last(tape: Tape) -> Tape:
    """Returns `tape` with small all-reduces last, side by side, and all that depends on them.

    One on which a large tensor depends stays where it is.
    """
    needs = needs_of(tape)
    moved: set[int] = set()
    for place, call in enumerate(tape.calls):
        if torch_compat.is_all_reduce(call.operator) and _is_small(tape, call):
            dependents = _dependents(place, needs)
            if all(_is_small(tape, tape.calls[each]) for each in dependents):
                moved |= dependents
    stages = _stages(tape, moved, needs)
    rest = [place for place in range(len(tape.calls)) if place not in moved]
    last = sorted(moved, key=lambda place: (stages[place], place))
    return tape.with_calls(tape.calls[place] for place in (*rest, *last))


def _dependents(place: int, needs: list[set[int]]) -> set[int]:
    """Returns the place of a call and those of all that must come after it."""
    found = {place}
    for later in range(place + 1, len(needs)):
        if needs[later] & found:
            found.add(later)
    return found


def _is_small(tape: Tape, call: Call) -> bool:
    if call.operator is check:  # a step that may be left there should not have gone far
        return False
    touched = (*call.operands, *call.results)
    forms = [tape.forms[value.number] for value in touched]
    return all(form is not None and form.elements <= SMALL for form in forms) and (
        torch_compat.is_all_reduce(call.operator)
        or torch_compat.is_wait(call.operator)
        or not torch_compat.is_of_collectives(call.operator)
    )


def _stages(tape: Tape, moved: set[int], needs: list[set[int]]) -> dict[int, int]:
    """Returns how many collectives come, one after the other, before each call that is moved."""
    stages: dict[int, int] = {}
    for place in sorted(moved):
        before = needs[place] & moved
        stages[place] = max(
            (stages[n] + torch_compat.is_all_reduce(tape.calls[n].operator) for n in before),
            default=0,
        )
    return stages
