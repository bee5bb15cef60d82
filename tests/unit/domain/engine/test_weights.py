"""A weight follows the activations, unless less is sent if an activation moves."""

import attrs
import pytest

from shardcore.domain.engine.call import PlacedTensor
from shardcore.domain.engine.choice import choose
from shardcore.domain.engine.rules import basic
from shardcore.domain.engine.rules.rule import rule as rule_of_text
from shardcore.domain.layouts.layout import Layout
from tests.unit.domain.engine.operands import MATMUL, PAIR, SQUARE, placed


def test_a_weight_follows_the_activation():
    # The rows of the activation are sharded by a factor that the weight lacks. To gather the
    # activation would be cheaper by far.
    rows = placed((8, 4), ("model", None))
    for spec in (None, "model"), ("model", None):
        weight = placed((4, 60_000), spec, weight=True)
        chosen = choose(MATMUL, (rows, weight), ((8, 60_000),))
        assert chosen.operands == (rows.layout, Layout.replicated(PAIR, 2))
        assert chosen.results == (Layout(PAIR, ("model", None)),)
        assert not chosen.gathers


def test_the_weight_of_a_norm_follows_the_activation():
    rule = basic.elementwise(((8, 4), (4,)))
    rows, weight = placed((8, 4), ("model", None)), placed((4,), ("model",), weight=True)
    assert choose(rule, (rows, weight)).operands == (rows.layout, Layout.replicated(PAIR, 1))
    # Where the axis shards no activation, the weight stays.
    full = placed((8, 4), (None, None))
    columns = Layout(PAIR, (None, "model"))
    assert choose(rule, (full, weight)).operands == (columns, weight.layout)


def test_an_activation_moves_if_that_is_cheaper():
    rows = placed((8, 4), ("model", None))
    columns = placed((4, 60_000), (None, "model"))
    chosen = choose(MATMUL, (rows, columns), ((8, 60_000),))
    assert chosen.operands == (Layout.replicated(PAIR, 2), columns.layout)
    assert chosen.results == (Layout(PAIR, (None, "model")),)


def test_of_two_weights_the_cheaper_one_moves():
    rows = placed((8, 4), ("model", None), weight=True)
    columns = placed((4, 60_000), (None, "model"), weight=True)
    chosen = choose(MATMUL, (rows, columns), ((8, 60_000),))
    assert chosen.operands == (Layout.replicated(PAIR, 2), columns.layout)


def test_an_activation_that_is_sharded_by_a_factor_of_the_weight_may_move():
    def targets(rows, inner, columns):
        activation = placed((rows, inner), (None, "model"))
        weight = placed((inner, columns), (None, "model"), weight=True)
        chosen = choose(MATMUL, (activation, weight), ((rows, columns),))
        return [str(layout.placement("model")) for layout in chosen.operands]

    # A small activation is gathered; a large one stays, and the small weight moves.
    assert targets(rows=8, inner=4, columns=60_000) == ["R", "S(1)"]
    assert targets(rows=60_000, inner=40, columns=2) == ["S(1)", "S(0)"]


def test_a_weight_that_is_sharded_by_the_factor_of_the_activation_stays():
    inner = placed((8, 4), (None, "model"))
    weight = placed((4, 6), ("model", None), weight=True)
    chosen = choose(MATMUL, (inner, weight), ((8, 6),))
    assert chosen.operands == (inner.layout, weight.layout)
    assert chosen.results == (Layout(PAIR, (None, None), {"model": "sum"}),)


def test_a_weight_follows_along_each_axis_on_its_own():
    rows = placed((8, 4), ("data", None), SQUARE)
    weight = placed((4, 60_000), (None, ("model", "data")), SQUARE, weight=True)
    chosen = choose(MATMUL, (rows, weight), ((8, 60_000),))
    assert chosen.operands == (rows.layout, Layout(SQUARE, (None, "model")))
    assert chosen.results == (Layout(SQUARE, ("data", "model")),)


def test_a_weight_that_scales_an_activation_of_its_size_that_is_not_sharded_is_gathered():
    full = placed((8, 4), (None, None))
    pending = PlacedTensor((8, 4), Layout(PAIR, (None, None), {"model": "sum"}))
    weight = placed((8, 4), ("model", None), weight=True)
    both_full = (Layout.replicated(PAIR, 2),) * 2
    rule = basic.elementwise(((8, 4), (8, 4)))
    for operands in (full, weight), (weight, full), (pending, weight):
        chosen = choose(rule, operands, scales=True)
        assert chosen.operands == both_full
        assert not chosen.gathers


def test_other_weights_that_meet_an_activation_that_is_not_sharded_stay():
    rule = basic.elementwise(((8, 4), (8, 4)))
    full = placed((8, 4), (None, None))
    weight = placed((8, 4), ("model", None), weight=True)
    stay = (weight.layout, weight.layout)
    assert choose(rule, (full, weight)).operands == stay  # it does not scale
    assert choose(rule, (full, attrs.evolve(weight, weight=False)), scales=True).operands == stay
    assert choose(rule, (attrs.evolve(full, weight=True), weight), scales=True).operands == stay
    larger = placed((2, 8, 4), (None, None, None))
    chosen = choose(basic.elementwise(((2, 8, 4), (8, 4))), (larger, weight), scales=True)
    assert chosen.operands == (Layout(PAIR, (None, "model", None)), weight.layout)


@pytest.mark.parametrize(
    ("first", "second", "weights", "gathers"),
    [
        (None, "model", (False, True), False),
        ("model", None, (False, True), True),
        (None, "model", (False, False), True),
        (None, "model", (True, True), True),
    ],
)
def test_the_plan_reports_a_gathered_activation_before_a_gathered_weight(
    first, second, weights, gathers
):
    rule = rule_of_text("-, - -> -")
    operands = [
        placed((8,), (axis,), weight=weight)
        for axis, weight in zip((first, second), weights, strict=True)
    ]
    chosen = choose(rule, tuple(operands))
    assert chosen.operands == (Layout.replicated(PAIR, 1),) * 2
    assert chosen.gathers == gathers
