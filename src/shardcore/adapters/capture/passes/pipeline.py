"""Runs passes in order, and checks what each of them needs and keeps (ADR 28)."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Set
from enum import Enum
from functools import reduce

import attrs

from shardcore.adapters.capture.trace.trace import Trace, values
from shardcore.domain.capture import NotCaptured


class Fact(Enum):
    """A fact about a trace that passes rely on."""

    UNREAD_LOSS = "the backward pass does not depend on the value of the loss"
    NEW_MEMORY = "no result is written into the memory of a dead operand"


@attrs.frozen
class Pass:
    """A function from trace to trace, with what it declares.

    Each pass keeps the writes into tensors from outside the step, but for donated inputs, the
    random draws and the form of the outputs, and reads no value before a call makes it.

    Args:
        run: The function.
        needs: Facts that hold before it.
        gives: Facts that hold after it.
        breaks: Facts that may no longer hold after it.
        joins: Whether it joins or repeats collectives; else it keeps them and their order.
    """

    run: Callable[[Trace], Trace]
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
        for pass_ in self.passes:
            for fact in pass_.needs - facts:
                wrong = f"pass {pass_.name!r} stands where this may not hold: {fact.value}"
                raise AssertionError(wrong)
            facts = (facts | pass_.gives) - pass_.breaks

    def __call__(self, trace: Trace) -> Trace:
        """Runs all passes; if an effect is lost, runs them again to find the pass at fault.

        Raises:
            NotCaptured: If a pass does not keep what it declares to keep; the error names it.
        """
        final = reduce(lambda trace, pass_: pass_.run(trace), self.passes, trace)
        if _broken(trace, final, joins=any(pass_.joins for pass_ in self.passes)):
            for pass_ in self.passes:
                before, trace = trace, pass_.run(trace)
                if broken := _broken(before, trace, joins=pass_.joins):
                    raise NotCaptured(
                        f"pass {pass_.name!r} does not keep {broken}: please report it"
                    )
        return final


def _broken(before: Trace, after: Trace, *, joins: bool) -> str:
    """Names the effect that a pass did not keep; empty if it kept all that it declares."""
    names = ["writes", "draws", "outputs", *([] if joins else ["collectives"])]
    for name, old, new in zip(names, _effects(before), _effects(after), strict=False):
        if old != new:
            return name
    return "" if _is_ordered(after) else "the order of calls and their operands"


def _effects(trace: Trace) -> Iterator[Hashable]:
    """Yields the effects of a step, in the order of the names in `_broken`."""
    given = trace.given() - trace.memories(trace.inputs[: trace.donated])
    written = (trace.memory[value.number] for call in trace.calls for value in call.writes)
    yield frozenset(Counter(memory for memory in written if memory in given).items())
    draws = (call.operator for call in trace.calls if call.draws)
    yield frozenset(Counter(draws).items())
    yield tuple(trace.forms[value.number] for value in values(trace.outputs))
    yield tuple(call.collective for call in trace.calls if call.collective)


def _is_ordered(trace: Trace) -> bool:
    """Checks that each value exists before a call reads it."""
    known = {*(value.number for value in trace.inputs), *trace.outside, *trace.scratch}
    for call in trace.calls:
        if not known.issuperset(value.number for value in call.operands):
            return False
        known.update(value.number for value in call.results)
    return known.issuperset(value.number for value in values(trace.outputs))
