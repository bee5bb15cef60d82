"""No change of Python state is missed: a captured step sees it, or the step says why it is eager.

The programs are drawn by a seed from lists: kinds of state, where they are held, how they are
reached, and how they change. Here run one of four, and fewer on ranks, since all of them take
minutes: `make states` runs all, and `python -m tests.distributed.capture.states 10` ten times more.
"""

from unittest import mock

import pytest

import shardcore
from shardcore.binding.capture.step import CapturedStep
from shardcore.testing import run_ranks
from tests.distributed.capture.states.programs import drawn
from tests.distributed.capture.states.running import (
    IN_FIT,
    Outcome,
    of_parts,
    summary,
    verdicts,
)
from tests.distributed.programs import distribute

SEED, SHARE, ON_RANKS = 0, 8, 3


def cases():
    return [*of_parts(), *drawn(SEED)]


def on_ranks(first):
    """Returns a sample, without programs that wait for a clock, which ranks read apart."""
    timeless = [case for case in cases() if "SECONDS" not in case.source]
    return timeless[first :: len(timeless) // ON_RANKS]


def check(found):
    """Every program saw the change, or said why it is not captured."""
    text = summary(found)
    print(text)
    wrong = [each for each in found if each.outcome not in (Outcome.FRESH, Outcome.REFUSED)]
    assert wrong == [], text


def test_no_change_of_state_is_missed():
    def program(rank):
        shardcore.install("single")
        return verdicts(cases()[::SHARE])

    (found,) = run_ranks(program, 1, timeout=280)
    check(found)


@pytest.mark.parametrize(("strategy", "first"), [("dtensor", 3), ("manual", 10)])
def test_no_change_between_epochs_is_missed_on_two_ranks(strategy, first):
    def program(rank):
        distribute((2, 1), strategy=strategy)
        return verdicts(on_ranks(first), IN_FIT)

    for found in run_ranks(program, 2, timeout=280):
        check(found)


def test_a_step_that_compares_nothing_is_stale():
    """The other tests can fail."""

    def program(rank):
        shardcore.install("single")
        plain = [case for case in drawn(SEED) if case.kind in ("a number", "a list, set")]
        with mock.patch.object(CapturedStep, "_check_guard"):
            return [each.outcome for each in verdicts(plain)]

    assert run_ranks(program, 1) == [[Outcome.STALE] * 2]
