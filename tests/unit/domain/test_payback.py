"""When recording a step pays, by counts that are equal on all ranks, and by measured times."""

import math

import pytest

from shardcore.domain.capture import LATER, MEASURED, NEEDED, Payback


def after(*seconds):
    payback = Payback()
    for time in seconds:
        payback = payback.after(time)
    return payback


def test_two_eager_steps_come_first():
    assert [after(*[0.1] * steps).is_due(10**6) for steps in range(4)] == [False, False, True, True]


@pytest.mark.parametrize(("left", "is_due"), [(0, False), (NEEDED - 1, False), (NEEDED, True)])
def test_a_call_with_few_steps_left_runs_eagerly(left, is_due):
    assert after(0.1, 0.1).is_due(left) == is_due


def test_a_loop_is_recorded_once_it_has_run_long():
    due = [after(*[0.1] * steps).is_due(None) for steps in range(NEEDED + 1)]
    assert due == [False] * NEEDED + [True]


def test_steps_that_ran_count_like_steps_that_are_left():
    """An evaluate after each epoch has few steps, but many of them come."""
    assert after(*[0.1] * NEEDED).is_due(3)


def test_one_recorded_step_pays_earlier_than_two():
    steps = max(MEASURED, NEEDED // 2)
    assert after(*[0.1] * steps).is_due(None, recordings=1)
    assert not after(*[0.1] * steps).is_due(None)


def test_infinity_records_at_once_and_goes_on_whatever_it_costs():
    assert Payback().is_due(math.inf)
    assert Payback().is_worth(math.inf, recorded=10.0)


def test_the_first_eager_step_is_not_measured():
    assert after(9.0).seconds == math.inf
    assert after(9.0, 0.2, 0.1, 0.3).seconds == 0.1


@pytest.mark.parametrize(("left", "is_worth"), [(20, False), (60, True)])
def test_a_recording_of_ten_eager_steps_needs_many_left(left, is_worth):
    assert after(1.0, 0.1).is_worth(left, recorded=1.0) == is_worth


def test_after_a_recording_that_took_too_long_more_steps_are_needed():
    payback = after(*[0.1] * 4).postponed()
    assert not payback.is_due(LATER * NEEDED - 1)
    assert payback.is_due(LATER * NEEDED)
