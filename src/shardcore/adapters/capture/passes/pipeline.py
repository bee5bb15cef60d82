"""Runs passes in order, and checks what each of them needs and keeps."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Set
from enum import Enum
from functools import reduce

import attrs

from shardcore.adapters.capture.tape.tape import Tape, values
from shardcore.domain.steps.capture import NotCaptured


class Fact(Enum):
    """A fact about a tape that passes rely on."""

    UNREAD_LOSS = "the backward pass does not depend on the value of the loss"
    NEW_MEMORY = "no result is written into the memory of a dead operand"


@attrs.frozen
class Pass:
    """A function from tape to tape, with what it declares.

    Each pass keeps the writes into tensors from outside the step, but for donated inputs, the
    random draws and the form of the outputs, and reads no value before a call makes it.

    Args:
        run: The function.
        needs: Facts that hold before it.
        gives: Facts that hold after it.
        breaks: Facts that may no longer hold after it.
        joins: Whether it joins or repeats collectives; else it keeps them and their order.
    """

    run: Callable[[Tape], Tape]
    needs: Set[Fact] = frozenset()
    gives: Set[Fact] = frozenset()
    breaks: Set[Fact] = frozenset()
    joins: bool = False

    @property
    def name(self) -> str:
        """The name of the function, of which `run` may be a `partial`."""
        return getattr(self.run, "func", self.run).__name__


@attrs.frozen
class Pipeline:
    """Passes in an order in which each finds the facts that it needs.

    Args:
        passes: The passes, in order.

    Raises:
        AssertionError: If a pass needs a fact that does not hold where it stands.
    """

    passes: tuple[Pass, ...]

    def __attrs_post_init__(self) -> None:
        facts = {Fact.NEW_MEMORY}  # as recorded: torch gives each result new memory
        for each in self.passes:
            for fact in each.needs - facts:
                wrong = f"pass {each.name!r} stands where this may not hold: {fact.value}"
                raise AssertionError(wrong)
            facts = (facts | each.gives) - each.breaks

    def __call__(self, tape: Tape) -> Tape:
        """Returns `tape` after all passes.

        Raises:
            NotCaptured: If a pass does not keep what it declares to keep; the error names it.
        """
        found = reduce(lambda tape, each: each.run(tape), self.passes, tape)
        if _broken(tape, found, joins=any(each.joins for each in self.passes)):
            for each in self.passes:
                before, tape = tape, each.run(tape)
                if broken := _broken(before, tape, joins=each.joins):
                    raise NotCaptured(
                        f"pass {each.name!r} does not keep {broken}: please report it"
                    )
        return found


def _broken(before: Tape, after: Tape, *, joins: bool) -> str:
    """Returns the effect that a pass did not keep; empty if it kept all that it declares."""
    names = ["writes", "draws", "outputs", *([] if joins else ["collectives"])]
    for name, old, new in zip(names, _effects(before), _effects(after), strict=False):
        if old != new:
            return name
    return "" if _is_ordered(after) else "the order of calls and their operands"


def _effects(tape: Tape) -> Iterator[Hashable]:
    """Yields the effects of a step, in the order of the names in `_broken`."""
    given = tape.given() - tape.memories(tape.inputs[: tape.donated])
    written = (tape.memory[value.number] for call in tape.calls for value in call.writes)
    yield frozenset(Counter(each for each in written if each in given).items())
    draws = (call.operator for call in tape.calls if call.draws)
    yield frozenset(Counter(draws).items())
    yield tuple(tape.forms[value.number] for value in values(tape.outputs))
    yield tuple(call.collective for call in tape.calls if call.collective)


def _is_ordered(tape: Tape) -> bool:
    """Returns whether each value exists before a call reads it."""
    known = {*(value.number for value in tape.inputs), *tape.outside, *tape.kept}
    for call in tape.calls:
        if not known.issuperset(value.number for value in call.operands):
            return False
        known.update(value.number for value in call.results)
    return known.issuperset(value.number for value in values(tape.outputs))
