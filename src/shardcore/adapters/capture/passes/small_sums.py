"""Sums of a few numbers, those of losses and metrics, are left to the end of the step."""

from collections.abc import Sequence

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.guards import check
from shardcore.adapters.capture.tape import Call, Tape

# The elements of a tensor that is small: a loss, a count, the counts of some classes.
SMALL = 64


def with_small_sums_last(tape: Tape) -> Tape:
    """Small all-reduces come last, one beside the other, if only small tensors hang on them."""
    moved = _movable(tape)
    stages = _stages(tape, moved)
    calls = [call for place, call in enumerate(tape.calls) if place not in moved]
    for _, place in sorted((stage, place) for place, stage in stages.items()):
        calls.append(tape.calls[place])
    return tape.with_calls(calls)


def _movable(tape: Tape) -> set[int]:
    """The places of the small all-reduces, and of all that hangs on them."""
    effects = [(tape.reads_of(call), tape.writes_of(call)) for call in tape.calls]
    moved: set[int] = set()
    for place, call in enumerate(tape.calls):
        if torch_compat.is_all_reduce(call.operator) and place not in moved:
            moved |= _small_dependents(tape, place, effects)
    return moved if _may_move(tape, moved) else set()


def _small_dependents(
    tape: Tape, place: int, effects: Sequence[tuple[set[int], set[int]]]
) -> set[int]:
    """The places of the call at `place` and those that must come after it; none if one is large.

    Args:
        tape: A step.
        place: Where the first one stands.
        effects: By place, the memories that a call reads, and those that it writes.
    """
    found: set[int] = set()
    made, read = set[int](), set[int]()
    for later in range(place, len(tape.calls)):
        reads, writes = effects[later]
        if later == place or (reads | writes) & made or writes & read:
            if not _is_small(tape, tape.calls[later]):
                return set()
            found.add(later)
            made |= writes
            read |= reads
    return found


def _is_small(tape: Tape, call: Call) -> bool:
    if call.operator is check:  # a step that goes another way should not have gone far
        return False
    touched = (*call.operands, *call.results)
    forms = [tape.forms[value.number] for value in touched]
    return all(form is not None and form.elements <= SMALL for form in forms) and (
        torch_compat.is_all_reduce(call.operator)
        or torch_compat.is_wait(call.operator)
        or not torch_compat.is_of_collectives(call.operator)
    )


def _may_move(tape: Tape, moved: set[int]) -> bool:
    """Whether nobody else draws or writes after what is moved: each has its own order."""
    touched: set[int] = set()
    for place, call in enumerate(tape.calls):
        if place in moved:
            touched |= tape.reads_of(call) | tape.writes_of(call)
        elif tape.writes_of(call) & touched:
            return False
    return not any(torch_compat.draws(tape.calls[place].operator) for place in moved)


def _stages(tape: Tape, moved: set[int]) -> dict[int, int]:
    """How many collectives stand, one after the other, before each call that is moved."""
    stages: dict[int, int] = {}
    after: dict[int, int] = {}  # by memory, the stage of the last call that touched it
    for place in sorted(moved):
        call = tape.calls[place]
        touched = tape.reads_of(call) | tape.writes_of(call)
        stage = max((after.get(memory, 0) for memory in touched), default=0)
        stages[place] = stage
        made = stage + torch_compat.is_all_reduce(call.operator)
        after |= dict.fromkeys(touched, stage)
        after |= dict.fromkeys(tape.writes_of(call), made)
    return stages
