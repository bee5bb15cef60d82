"""When a callback saves: after steps, epochs or minutes."""

import pytest

from shardcore.binding.checkpoints import callback as due
from shardcore.domain.errors import CheckpointError


class NoSession:
    def current(self):
        return None


def test_steps_count_also_if_a_call_has_several():
    each = due.Due(NoSession(), steps=3, epochs=None, minutes=None)
    saved = [step for step in range(2, 13, 2) if each.after_step(step - 2, step)]
    assert saved == [4, 6, 10, 12]
    assert not each.after_epoch(1)


def test_each_epoch_is_the_default():
    assert due.Due(NoSession(), None, None, None).after_epoch(1)
    assert [n for n in (1, 2, 3, 4) if due.Due(NoSession(), None, 2, None).after_epoch(n)] == [2, 4]


def test_minutes_are_looked_at_seldom_and_met_closely(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(due.time, "monotonic", lambda: now[0])
    each = due.Due(NoSession(), None, None, minutes=1.0)
    each.start(0)
    saved, looks = [], []
    for step in range(1, 1501):
        now[0] += 0.125
        before = each._look
        if each.after_step(step - 1, step):
            saved.append(step)
        if each._look != before:
            looks.append(step)
    assert saved == [480, 960, 1440]
    assert len(looks) < 50


@pytest.mark.parametrize("name", ["steps", "epochs", "minutes"])
def test_what_is_not_above_zero_is_refused(name):
    given = {"steps": None, "epochs": None, "minutes": None} | {name: 0}
    with pytest.raises(CheckpointError, match=f"every_{name} above 0"):
        due.Due(NoSession(), **given)
