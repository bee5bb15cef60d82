"""Packages offer sharding rules for their operators."""

from shardcore.bootstrap import plugin_rules, plugins
from tests.plugins.packages import write_package

SOURCE = """
from shardcore.ports.hookspecs import hookimpl

@hookimpl
def shardcore_operator_rules():
    raise AssertionError("it is called by install()")
"""


def test_a_hook_that_fails_or_gives_no_pairs_is_passed_over():
    def fails():
        raise OSError("no library")

    offered = [("one", fails), ("two", lambda: [3]), ("three", lambda: [("op", "n -> n")])]
    declared = []
    broken = plugin_rules.declare(offered, lambda *pair: declared.append(pair))
    assert set(broken) == {"one", "two"}
    assert "its hook shardcore_operator_rules() failed: OSError: no library" in broken["one"]
    assert declared == [("op", "n -> n")]


def test_a_package_may_offer_rules_alone(packages):
    write_package(packages, "only-rules", SOURCE)
    loaded = plugins.load()
    assert [package for package, _ in loaded.rules] == ["only-rules"]
    assert "only-rules" not in loaded.strategies.broken
