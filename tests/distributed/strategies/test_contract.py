"""Every strategy of shardcore keeps the promises of strategies."""

import pytest

from shardcore.testing import StrategyContract
from shardcore.testing.contract import failing
from tests import warm


class TestDTensor(StrategyContract):
    strategy = "dtensor"


class TestManual(StrategyContract):
    strategy = "manual"

    @pytest.fixture(autouse=True)
    def forked(self, monkeypatch):
        """Its ranks are forked; those of `dtensor` are new interpreters, as users start them."""
        monkeypatch.setattr(failing, "_start", warm.Program)


class TestSingle(StrategyContract):
    strategy = "single"
    several_ranks = False
