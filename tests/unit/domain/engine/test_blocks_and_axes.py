"""Blocks of a dim, the order of its axes, ties, and a proof that no other choice is cheaper."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.cost.collective_cost import Costs, Link
from shardcore.domain.engine.call import PlacedTensor
from shardcore.domain.engine.choice import choose
from shardcore.domain.engine.redistribution import plan
from shardcore.domain.engine.rules import basic, layers, movement
from shardcore.domain.engine.rules.rule import Result
from shardcore.domain.engine.rules.rule import rule as rule_of_text
from shardcore.domain.errors import LayoutError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import Segments, Shard
from tests.unit.domain.engine.operands import (
    MATMUL,
    ONE_GROUP,
    PAIR,
    SQUARE,
    P,
    R,
    layouts_of,
    local_shapes,
    placed,
    words,
)


def test_blocks_stay_through_reshapes_and_arithmetic():
    rows = placed((5, 4), ("model", None))
    flat = movement.reshape((5, 4), (20,))
    chosen = choose(flat, (rows,))
    assert chosen.operands == (rows.layout,)
    (fours,) = chosen.results
    assert fours == Layout(PAIR, ("model",), blocks=(4,))
    assert local_shapes(fours, (20,)) == [(12,), (8,)]

    operands = (PlacedTensor((20,), fours), PlacedTensor((1,), Layout.replicated(PAIR, 1)))
    chosen = choose(basic.elementwise(((20,), (1,))), operands)
    assert chosen.operands == layouts_of(operands)
    assert chosen.results == (fours,)

    chosen = choose(movement.reshape((20,), (5, 4)), (PlacedTensor((20,), fours),))
    assert chosen.operands == (fours,)
    assert chosen.results == (rows.layout,)
    assert local_shapes(rows.layout, (5, 4)) == [(3, 4), (2, 4)]


@pytest.mark.parametrize(
    ("shape", "spec", "blocks", "target", "parts"),
    [
        # Blocks of some steps of the factor: 3 rows of 4.
        ((40,), "model", 12, (10, 4), [(6, 4), (4, 4)] * 2),
        # Blocks of less than a step, though chunks are of whole steps.
        ((24,), "data", 1, (6, 4), [(3, 4)] * 4),
        ((20,), "model", 6, (5, 4), [(3, 4), (2, 4)] * 2),
        ((48,), ("data", "model"), 1, (12, 4), [(3, 4)] * 4),
        # Blocks of a step, by two axes, the last one the major: chunks of 3, 2, 2 and 2.
        ((36,), ("model", "data"), 4, (9, 4), [(3, 4), (2, 4), (2, 4), (2, 4)]),
    ],
)
def test_a_dim_whose_chunks_are_whole_steps_is_not_moved(shape, spec, blocks, target, parts):
    layout = Layout(SQUARE, (spec,), blocks=(blocks,)).normalized(shape)
    found = movement.reshape(shape, target)
    chosen = choose(found, (PlacedTensor(shape, layout),))
    assert chosen.operands == (layout,)
    assert local_shapes(chosen.results[0], target) == parts


def test_factors_that_are_together_in_a_dim_get_their_steps_from_results():
    flat = PlacedTensor((12,), Layout(SQUARE, (("data", "model"),), blocks=(Segments(4, outer=1),)))
    apart = rule_of_text("a*b -> a b")
    assert choose(apart, (flat,), ((4, 3),)).results == (Layout(SQUARE, ("data", "model")),)
    for shapes in ((), ((4, 4),)):
        with pytest.raises(LayoutError, match=r"'a\*b -> a b' has no steps for .* \[\(12,\)\]"):
            choose(apart, (flat,), shapes)


def test_chunks_of_whole_steps_by_two_axes_are_not_moved_though_a_block_is_less_than_a_step():
    # Chunks of 6, 6 and 3 steps of 4, twice: the least block of these is 6, which is no whole step.
    layout = Layout(Mesh((2, 3), ("data", "model")), (("data", "model"),), blocks=(12,))
    layout = layout.normalized((120,))
    chosen = choose(movement.reshape((120,), (30, 4)), (PlacedTensor((120,), layout),))
    assert chosen.operands == (layout,)
    assert local_shapes(chosen.results[0], (30, 4)) == [(6, 4), (6, 4), (3, 4)] * 2


def test_a_dim_whose_chunks_are_no_whole_steps_is_sharded_between_steps():
    flat = placed((20,), ("model",))
    chosen = choose(movement.reshape((20,), (5, 4)), (flat,))
    assert chosen.operands == (Layout(PAIR, ("model",), blocks=(4,)),)
    assert chosen.results == (Layout(PAIR, ("model", None)),)
    assert not chosen.gathers


def test_the_cheaper_of_two_block_sizes_of_a_dim_is_kept():
    rule = basic.elementwise(((20, 8), (20, 1)))
    for large, small in (1, 4), (4, 1):
        operands = (
            placed((20, 8), ("model", None), blocks=(large, 1)),
            placed((20, 1), ("model", None), blocks=(small, 1)),
        )
        target = Layout(PAIR, ("model", None), blocks=(large, 1))
        for order in (operands, operands[::-1]):
            shapes = tuple(each.shape for each in order)
            assert choose(basic.elementwise(shapes), order).operands == (target, target)
        assert choose(rule, operands).results == (target,)


def test_axes_that_shard_a_dim_keep_their_order():
    swapped = placed((8, 4), (("model", "data"), None), SQUARE)
    other = placed((8, 4), (None, None), SQUARE)
    for operands in (swapped, other), (other, swapped):
        chosen = choose(basic.elementwise(((8, 4), (8, 4))), operands)
        assert chosen.operands == (swapped.layout, swapped.layout)
        assert chosen.results == (swapped.layout,)


def test_axes_keep_an_order_that_leaves_no_part_empty_where_that_of_the_mesh_does():
    # 9 rows by "data" and then "model" are 2, 2, 1, 2, 2 and 0.
    rows = placed((9, 4), (("model", "data"), None), Mesh((2, 3), ("data", "model")))
    chosen = choose(basic.elementwise(((9, 4),)), (rows,))
    assert chosen.operands == chosen.results == (rows.layout,)
    assert not chosen.gathers


def test_over_a_slow_link_less_is_sent_in_more_collectives():
    """The kernel is moved and the sum left pending, in place of an all-gather of more."""
    rows = placed((256, 512), (None, "model"))
    kernel = placed((512, 8), (None, "model"), weight=True)
    fast = choose(MATMUL, (rows, kernel), ((256, 8),), costs=Costs({"model": Link(1e-3, 1e12)}))
    slow = choose(MATMUL, (rows, kernel), ((256, 8),), costs=Costs({"model": Link(1e-9, 1e6)}))
    assert words(fast)[0] == "R"
    assert words(slow) == ["S(1)", "S(0)", "P(sum)"]


def test_the_first_operand_says_the_order_of_axes():
    first = placed((8, 4), (("model", "data"), None), SQUARE)
    second = placed((8, 4), (("data", "model"), None), SQUARE)
    rule = basic.elementwise(((8, 4), (8, 4)))
    for operands in (first, second), (second, first):
        assert choose(rule, operands).operands == (operands[0].layout,) * 2


@pytest.mark.parametrize("turned", [False, True])
def test_of_shardings_of_equal_cost_that_of_the_first_operand_is_chosen(turned):
    rows, columns = placed((8, 8), ("model", None)), placed((8, 8), (None, "model"))
    first, second = (columns, rows) if turned else (rows, columns)
    chosen = choose(basic.elementwise(((8, 8), (8, 8))), (first, second))
    assert chosen.operands == (first.layout, first.layout)


TIES = """
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.engine.rules.basic import elementwise
from shardcore.domain.engine.call import PlacedTensor
from shardcore.domain.engine.choice import choose

mesh = Mesh((2, 2), ("data", "model"))
specs = [("data", "model", None), (None, "data", "model"), ("model", None, "data")]
operands = tuple(PlacedTensor((4, 4, 4), Layout(mesh, spec)) for spec in specs)
print(choose(elementwise(((4, 4, 4),) * 3), operands))
"""


def test_every_process_decides_ties_alike():
    """Ranks are processes, and in each one sets of words have another order."""
    printed = [
        subprocess.check_output(
            [sys.executable, "-c", TIES], env={**os.environ, "PYTHONHASHSEED": seed}
        )
        for seed in ("1", "2", "3")
    ]
    assert len(set(printed)) == 1


# Of the bytes that two ranks hold together, what each sends; docs/reference/transitions.md.
SENT_OF_TWO = {"all_gather": 1 / 2, "reduce_scatter": 1 / 2, "all_to_all": 1 / 4, "all_reduce": 1}


@given(st.data())
def test_no_other_sharding_is_cheaper(data):
    """As `plan` brings each tensor from one layout to the other, operands and gradients."""
    rule = layers.convolution_backward(ONE_GROUP, 1)
    image, kernel = (data.draw(st.sampled_from([2, 400, 20_000])) for _ in range(2))
    shapes = (8, 6, image), (8, 4, image), (6, 4, kernel)
    placements = [R, P, *(Shard(dim, block) for dim in (0, 1) for block in (1, 2, 3))]
    sources = [
        Layout.from_placements(PAIR, [data.draw(st.sampled_from(placements))], 3).normalized(shape)
        for shape in shapes
    ]
    results = (*shapes[1:], (6,))
    candidates = {
        (rule.operands[number].dims[placement.dim].factor, placement.block)
        for number, placement in enumerate(layout.placement("model") for layout in sources)
        if isinstance(placement, Shard)
    }

    def sharded(term, shape, factor, block):
        """The layout of an operand or a result that has `factor` or not."""
        placement = Shard(term.dim_of(factor), block) if factor in term.factors else R
        if isinstance(term, Result) and factor in rule.sums(term):
            placement = P
        return Layout.from_placements(PAIR, [placement], len(shape)).normalized(shape)

    def cost(shape, source, target):
        steps = [step for step in plan(source, target, shape, 4) if step.kind != "slice"]
        held = 4 * shape[0] * (shape[1] * shape[2] if len(shape) > 1 else 1)
        return sum(Link().seconds(SENT_OF_TWO[step.kind] * held) for step in steps)

    def operands_of(candidate):
        terms = zip(rule.operands, shapes, strict=True)
        return tuple(sharded(term, shape, *candidate) for term, shape in terms)

    def total(candidate):
        found = sum(map(cost, shapes, sources, operands_of(candidate)))
        for term, shape in zip(rule.results, results, strict=True):
            layout = sharded(term, shape, *candidate)
            like = layout if term.like is None else sources[term.like]
            found += cost(shape, layout, like.reduced)
        return found

    operands = tuple(map(PlacedTensor, shapes, sources))
    chosen = choose(rule, operands, results).operands
    if candidates:
        least = min(map(total, candidates))
        assert chosen in [operands_of(each) for each in candidates if total(each) == least]
    else:
        assert chosen == (Layout.replicated(PAIR, 3),) * 3


def test_operands_that_do_not_fit_their_rule():
    rule = layers.convolution(ONE_GROUP, 1, bias=False)
    images, kernel = placed((2, 4, 8), (None,) * 3), placed((6, 4, 3), (None,) * 3)
    with pytest.raises(LayoutError, match="operand 0 has 3 dims, got shape"):
        choose(rule, (placed((2, 4), (None, None)), kernel))
    with pytest.raises(LayoutError, match=r"operand 1 .* factor 'c' would need 4 steps"):
        choose(rule, (images, placed((6, 5, 3), (None,) * 3)))
