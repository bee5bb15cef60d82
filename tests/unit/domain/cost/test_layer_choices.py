"""The cheapest choice for each layer, beside all combinations of choices."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.cost.layers import LayerCost, cheapest

COSTS = st.builds(LayerCost, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
LAYERS = st.lists(st.lists(COSTS, min_size=1, max_size=3), min_size=1, max_size=5)


def seconds_and_bytes(layers, choices):
    costs = [each[choice] for each, choice in zip(layers, choices, strict=True)]
    seconds = max(sum(c.serial for c in costs), sum(c.communication for c in costs))
    return seconds, sum(c.bytes for c in costs)


@given(LAYERS, st.integers(0, 40))
def test_no_combination_that_fits_is_shorter_or_as_short_and_smaller(layers, memory):
    combinations = product(*(range(len(each)) for each in layers))
    fit = [c for each in combinations if (c := seconds_and_bytes(layers, each))[1] <= memory]
    found = cheapest(layers, memory)
    if found is None:
        assert not fit
    else:
        assert seconds_and_bytes(layers, found) == min(fit)


@pytest.mark.parametrize("count", [40, 200])
def test_of_many_layers_it_is_close_to_the_best(count, monkeypatch):
    # Each layer may move its bytes or hold them: half of the layers can hold them.
    layers = [[LayerCost(1, 1, 10 + at), LayerCost(3 + at % 7, 1, 1)] for at in range(count)]
    memory = sum(each[0].bytes for each in layers) // 2
    exact = cheapest(layers, memory)
    monkeypatch.setattr("shardcore.domain.cost.layers.MOST_PARTIALS", 64)
    near = cheapest(layers, memory)
    best, _ = seconds_and_bytes(layers, exact)
    seconds, size = seconds_and_bytes(layers, near)
    assert best <= seconds <= 1.05 * best
    assert size <= memory
