"""The states of a captured step: the picture in the docs, and the limits."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from shardcore.domain.capture import (
    FEW_RUNS,
    MOST_CHANGES,
    MOST_DIFFERENCES,
    TRANSITIONS,
    Event,
    Progress,
    State,
)

PICTURE = Path(__file__).parents[3] / "docs" / "images" / "states.svg"


def after(*events):
    progress = Progress()
    for event in events:
        progress = progress.after(event)
    return progress


def test_the_picture_in_the_docs_has_every_transition():
    groups = ElementTree.parse(PICTURE).iter("{http://www.w3.org/2000/svg}g")
    drawn = [
        (*group.get("id").split("-"), event)
        for group in groups
        for event in "".join(group.itertext()).strip().split(", ")
    ]
    assert len(drawn) == len(TRANSITIONS)
    assert set(drawn) == {
        (state.name, to.name, event.value) for (state, event), to in TRANSITIONS.items()
    }


def test_every_state_is_reached_and_eager_is_the_end():
    assert {State.NEW, State.DEFERRED, *TRANSITIONS.values()} == set(State)
    assert {state for state, _ in TRANSITIONS} == set(State) - {State.EAGER}


def test_an_event_that_the_state_does_not_know_is_an_error():
    with pytest.raises(KeyError):
        after(Event.RAN)


def test_changes_in_a_row_are_too_many_unless_many_runs_are_between():
    change = (Event.RECORDED, Event.MATCHED, Event.RAN, Event.CHANGED)
    assert not after(*change * MOST_CHANGES).is_unstable
    assert after(*change * (MOST_CHANGES + 1)).is_unstable
    long = (Event.RECORDED, Event.MATCHED, *[Event.RAN] * (FEW_RUNS + 1), Event.CHANGED)
    assert not after(*change * MOST_CHANGES, *long, *change).is_unstable


def test_recordings_may_differ_a_few_times():
    differed = (Event.RECORDED, *[Event.DIFFERED] * MOST_DIFFERENCES)
    assert not after(*differed).is_unstable
    assert after(*differed, Event.DIFFERED).is_unstable
