"""The examples: the demo refuses runs that differ, and the plug-in is short."""

import numpy as np

from tests.checks.tree import ROOT

EXAMPLES = ROOT / "examples"


def test_a_difference_is_not_tolerated(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from comparison import Run

    one = Run("one", [{"loss": [2.0, 1.0]}], [[np.zeros(3)]])
    assert one.agrees_with(one)
    other_loss = Run("other", [{"loss": [2.0, 1.0]}, {"loss": [2.0, 1.1]}], one.weights)
    assert not other_loss.agrees_with(one)
    other_weight = Run("other", one.ranks, [[np.zeros(3)], [np.full(3, 0.1)]])
    assert not other_weight.agrees_with(one)


def test_the_plugin_is_short():
    lines = {
        path.name: len(path.read_text().splitlines())
        for path in (EXAMPLES / "strategy-plugin").glob("*.*")
    }
    assert sum(lines.values()) < 150, lines
