"""Draws a program for each seed, and makes a program that differs small.

hypothesis draws. It does not shrink: it tries hundreds of programs for that, of seconds each.
"""

import random
import time
from collections.abc import Iterator
from typing import Any

import attrs
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample

from tests.fuzz.programs import Program, drawn_programs
from tests.fuzz.running import Verdict, verdicts

# hypothesis tries its simplest program first, then one that is random; more resemble these.
_SETTINGS = settings(
    max_examples=2,
    database=None,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
_PARTS = ("events", "layers", "layout")


def drawn(seed: int) -> Program:
    """Returns the program of a seed."""
    programs: list[Program] = []

    def keep(program: Program) -> bool:
        programs.append(program)
        return False

    try:
        find(drawn_programs(), keep, settings=_SETTINGS, random=random.Random(seed))
    except NoSuchExample:
        return programs[-1]
    raise AssertionError("a program was found that no condition holds for")


def smallest(program: Program, verdict: Verdict, seconds: float) -> tuple[Program, Verdict]:
    """Returns a small program that differs as this one does, and its verdict.

    Args:
        program: A program that differs.
        verdict: Its verdict.
        seconds: After so many no smaller one is tried.
    """
    end = time.monotonic() + seconds
    kind = _kind(verdict)
    tried = {program}
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for other in smaller(program):
            if other in tried or time.monotonic() > end:
                continue
            tried.add(other)
            other_verdict = verdicts([other])[other]
            if _kind(other_verdict) == kind:
                program, verdict, is_smaller = other, other_verdict, True
                break
    return program, verdict


def smaller(program: Program) -> Iterator[Program]:
    """Yields programs without a part, or with a default in place of a value."""
    for name in _PARTS:
        parts = getattr(program, name)
        for number in range(len(parts)):
            rest = parts[:number] + parts[number + 1 :]
            if rest or name == "layers":
                yield attrs.evolve(program, **{name: rest})
    yield from _plainer(program)
    for name in ("events", "layers"):
        parts = getattr(program, name)
        for number, part in enumerate(parts):
            for other in _plainer(part):
                changed = (*parts[:number], other, *parts[number + 1 :])
                yield attrs.evolve(program, **{name: changed})


def _plainer(part: Any) -> Iterator[Any]:
    """Yields it with the default of each field that has another value."""
    for field in attrs.fields(type(part)):
        is_part = field.name in _PARTS and field.name != "layout"
        if not is_part and field.default not in (attrs.NOTHING, getattr(part, field.name)):
            yield attrs.evolve(part, **{field.name: field.default})


def _kind(verdict: Verdict) -> str:
    """Returns what a smaller program has to have in common: numbers that differ, or an error."""
    return f"{verdict.kind} {'number' if 'differs by' in verdict.why else verdict.why[:40]}"
