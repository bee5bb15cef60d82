"""The timeout of a process group: an argument, a variable of the environment, or ten minutes."""

import pytest

from shardcore.adapters.process_group import seconds
from shardcore.domain.errors import EnvironmentProblem


def test_the_timeout_is_the_argument_then_the_variable_then_ten_minutes(monkeypatch):
    monkeypatch.delenv("SHARDCORE_TIMEOUT", raising=False)
    assert seconds(None) == 600
    monkeypatch.setenv("SHARDCORE_TIMEOUT", "90.5")
    assert (seconds(None), seconds(5)) == (90.5, 5)


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan", "inf", ""])
def test_a_timeout_that_is_no_positive_number_is_refused(monkeypatch, text):
    monkeypatch.setenv("SHARDCORE_TIMEOUT", text)
    with pytest.raises(EnvironmentProblem, match="positive number of seconds"):
        seconds(None)
