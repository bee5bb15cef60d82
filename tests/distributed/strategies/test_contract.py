"""Every strategy of shardcore keeps the promises of strategies."""

from shardcore.testing import StrategyContract


class TestDTensor(StrategyContract):
    strategy = "dtensor"


class TestManual(StrategyContract):
    strategy = "manual"


class TestSingle(StrategyContract):
    strategy = "single"
    several_ranks = False
