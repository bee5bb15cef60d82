"""The planner splits an operator by its rule and the layouts of its operands."""

import os
import subprocess
import sys

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.errors import LayoutError
from shardcore.domain.layout import Layout
from shardcore.domain.machines.collective_cost import Costs, Link
from shardcore.domain.mesh import Mesh
from shardcore.domain.placements import Partial, Replicate, Segments, Shard
from shardcore.domain.planner.call import Placed
from shardcore.domain.planner.choice import choose
from shardcore.domain.redistribution.plan import plan
from shardcore.domain.rules import basic, layers, movement
from shardcore.domain.rules.rule import Result
from shardcore.domain.rules.rule import rule as rule_of_text

ONE_GROUP = layers.Channels(1, 4, 6, transposed=False)
CONVOLUTION = layers.convolution(ONE_GROUP, 2, bias=True)
IMAGES, KERNEL, BIAS = (5, 4, 6, 6), (6, 4, 3, 3), (6,)
MATMUL = rule_of_text("n k, k m -> n m")
R, P = Replicate(), Partial()
PAIR = Mesh((2,), ("model",))
SQUARE = Mesh((2, 2), ("data", "model"))


def placed(shape, spec, mesh=PAIR, blocks=None, weight=False):
    layout = Layout(mesh, spec) if blocks is None else Layout(mesh, spec, blocks=blocks)
    return Placed(shape, layout, weight=weight)


def layouts_of(operands):
    return tuple(each.layout for each in operands)


def local_shapes(layout, shape):
    return [layout.local_shape(shape, rank) for rank in range(layout.mesh.size)]


def convolved(*placements, mesh=(2,), output=(5, 6, 6, 6)):
    """The split of a convolution: operands and result as words, and whether one is gathered."""
    mesh = Mesh(mesh, ("data", "model")[: len(mesh)])
    operands = tuple(
        Placed(shape, Layout.from_placements(mesh, each, len(shape)), weight=shape != IMAGES)
        for shape, each in zip((IMAGES, KERNEL, BIAS), placements, strict=True)
    )
    chosen = choose(CONVOLUTION, operands, (output,))
    layouts = (*chosen.operands, *chosen.results)
    return [" ".join(map(str, each.placements)) for each in layouts], chosen.gathers


@pytest.mark.parametrize(
    ("placements", "words"),
    [
        (([R], [R], [R]), ["R", "R", "R", "R"]),
        (([Shard(0)], [R], [R]), ["S(0)", "R", "R", "S(0)"]),
        (([R], [Shard(0)], [R]), ["R", "S(0)", "S(0)", "S(1)"]),
        (([R], [R], [Shard(0)]), ["R", "S(0)", "S(0)", "S(1)"]),
        (([R], [Shard(1)], [R]), ["S(1)", "S(1)", "P(sum)", "P(sum)"]),
        (([P], [Shard(0)], [P]), ["R", "S(0)", "S(0)", "S(1)"]),
        (([P], [R], [R]), ["R", "R", "R", "R"]),
        (([Shard(2)], [Shard(0)], [R]), ["R", "S(0)", "S(0)", "S(1)"]),
    ],
)
def test_a_sharded_operand_stays_sharded(placements, words):
    assert convolved(*placements) == (words, False)


def test_the_factor_that_moves_fewer_bytes_is_split():
    rule = layers.convolution(ONE_GROUP, 2, bias=False)
    by_output, by_input = ["R", "S(0)", "S(1)"], ["S(1)", "S(1)", "P(sum)"]

    def words(images, output):
        operands = (
            placed(images, (None, "model", None, None)),
            placed(KERNEL, ("model", None, None, None)),
        )
        chosen = choose(rule, operands, (output,))
        return [str(layout.placement("model")) for layout in (*chosen.operands, *chosen.results)]

    assert words((5, 4, 6, 6), (5, 6, 6, 6)) == by_output
    # Of a small output the sum costs less than the gathering of the input.
    large = 5, 4, 600, 600
    assert words(large, (5, 6, 600, 600)) == by_output
    assert words(large, (5, 6, 1, 1)) == by_input


def product(rows, kernel, spec, weight=True, **facts):
    """The split of a product of rows that are split by the columns, and a kernel."""
    shape = rows[0], kernel[1]
    given = Placed(rows, Layout(PAIR, (None, "model")), **facts)
    return choose(MATMUL, (given, placed(kernel, spec, weight=weight)), (shape,))


def words(chosen):
    layouts = (*chosen.operands, *chosen.results)
    return [str(each.placement("model")) for each in layouts]


def test_a_small_activation_is_gathered_where_that_costs_less_than_a_pending_sum():
    small, large, not_split = (4, 8), (400_000, 8), (None, None)
    chosen = product(small, (8, 6), not_split)
    assert words(chosen) == ["R", "R", "R"]
    assert chosen.replicates
    assert not chosen.gathers
    # The gradient of the kernel has to come back, but the sum is smaller than the rows.
    chosen = product(large, (8, 2), not_split)
    assert words(chosen) == ["S(1)", "S(0)", "P(sum)"]
    assert not chosen.replicates


def test_the_way_back_of_a_gradient_counts_by_its_bytes():
    # A sum of 3 columns and the gradient of the kernel are less than 4 rows.
    assert words(product((4, 60), (60, 3), (None, None))) == ["S(1)", "S(0)", "P(sum)"]
    assert words(product((4, 60), (60, 5), (None, None))) == ["R", "R", "R"]


def test_an_expensive_operator_is_split_and_a_cheap_one_is_not():
    many, few = (40960, 8192), (40960, 64)
    assert words(product(many, (8192, 8192), (None, None))) == ["S(1)", "S(0)", "P(sum)"]
    assert words(product(few, (64, 8192), (None, None))) == ["R", "R", "R"]


def test_an_activation_is_split_for_a_sharded_weight():
    assert words(product((4, 8), (8, 6), ("model", None))) == ["S(1)", "S(0)", "P(sum)"]


def test_rows_of_a_batch_stay_split():
    rows, kernel = placed((4, 8), ("model", None)), placed((8, 6), (None, None), weight=True)
    assert words(choose(MATMUL, (rows, kernel), ((4, 6),))) == ["S(0)", "R", "S(0)"]
    # The gradient of a kernel: both operands have rows.
    gradient = placed((4, 6), ("model", None))
    turned = placed((8, 4), (None, "model"))
    assert words(choose(MATMUL, (turned, gradient), ((8, 6),))) == ["S(1)", "S(0)", "P(sum)"]


EXPERTS = rule_of_text("e n k, e k m -> e n m")


def of_experts(given, made, *, activations=(None, "model", None), **facts):
    """The split of a product of experts: tokens `(4, 8, given)`, split by tokens by default."""
    tokens = attrs.evolve(placed((4, 8, given), activations), **facts)
    kernel = placed((4, given, made), ("model", None, None), weight=True)
    return words(choose(EXPERTS, (tokens, kernel), ((4, 8, made),)))


def test_tokens_are_exchanged_for_experts_if_that_sends_fewer_bytes_than_the_experts():
    exchanged, gathered = ["S(0)", "S(0)", "S(0)"], ["S(1)", "R", "S(1)"]
    # Each rank has 4 of 8 tokens for each expert. The way back of a product decides the same.
    assert of_experts(3, 6) == of_experts(6, 3) == exchanged
    assert of_experts(2, 3) == of_experts(3, 2) == gathered
    by_expert = ("model", None, None)
    assert of_experts(2, 3, activations=by_expert) == exchanged
    # A copy that is split by experts is there already.
    assert of_experts(2, 3, other=Layout(PAIR, by_expert)) == exchanged


def test_equal_tokens_of_all_experts_are_gathered_once():
    exchanged, gathered = ["S(0)", "S(0)", "S(0)"], ["S(1)", "R", "S(1)"]
    # 8 tokens cost less than 4 experts of 3 columns, and more than 4 of one column.
    assert of_experts(2, 3, repeats=(0,)) == exchanged
    assert of_experts(2, 1, repeats=(0,)) == gathered


def test_a_gradient_of_experts_is_summed_where_they_are_or_by_tokens():
    turned = rule_of_text("e k n, e n m -> e k m")
    by_tokens = placed((4, 5, 8), (None, None, "model")), placed((4, 8, 6), (None, "model", None))
    assert words(choose(turned, by_tokens, ((4, 5, 6),))) == ["S(2)", "S(1)", "P(sum)"]
    by_expert = [
        attrs.evolve(each, other=Layout(PAIR, ("model", None, None))) for each in by_tokens
    ]
    assert words(choose(turned, tuple(by_expert), ((4, 5, 6),))) == ["S(0)", "S(0)", "S(0)"]


def test_a_weight_that_scales_is_gathered_though_all_have_its_factor():
    scale = rule_of_text("n c, c -> n c")
    rows, weight = placed((2, 64), ("model", None)), placed((64,), ("model",), weight=True)
    assert words(choose(scale, (rows, weight), ((2, 64),), scales=True)) == ["S(0)", "R", "S(0)"]


def test_a_sum_over_the_rows_of_a_batch_stays_pending_though_one_operand_is_not_split():
    turned, gradient = placed((2, 4), (None, "model")), placed((4, 64), (None, None))
    assert words(choose(MATMUL, (turned, gradient), ((2, 64),))) == ["S(1)", "S(0)", "P(sum)"]


def test_a_view_has_the_layout_of_its_tensor_not_of_a_copy():
    copied = Placed((4, 6), Layout(PAIR, (None, None)), other=Layout(PAIR, (None, "model")))
    assert words(choose(rule_of_text("a b -> b a"), (copied,))) == ["R", "R"]


def test_a_product_of_full_tensors_is_full_though_a_copy_of_one_is_split():
    one_hot = Placed((4, 6), Layout(PAIR, (None, None)), other=Layout(PAIR, (None, "model")))
    product = rule_of_text("n, n c -> n c")
    assert words(choose(product, (placed((4,), (None,)), one_hot), ((4, 6),))) == ["R", "R", "R"]


def test_an_operand_is_taken_from_where_it_costs_least():
    gradient, rows = placed((4, 6), (None, "model")), (8, 4)

    def chosen(other):
        turned = Placed(rows, Layout(PAIR, ("model", None)), other=other)
        return words(choose(MATMUL, (turned, gradient), ((8, 6),)))

    assert chosen(None) == ["S(0)", "R", "S(0)"]
    assert chosen(Layout.replicated(PAIR, 2)) == ["R", "S(1)", "S(1)"]


def test_a_dim_that_is_never_split_is_gathered():
    assert convolved([Shard(2)], [R], [R]) == (["R"] * 4, False)
    assert convolved([Shard(2)], [R], [R], mesh=(1,)) == (["R"] * 4, False)


def test_another_dim_is_split_where_all_of_the_work_costs_more_than_to_bring_it_there():
    def chosen(channels):
        image = placed((1024, channels, 64), (None, None, "model"))
        kernel = placed((channels, channels, 3), (None, None, None), weight=True)
        product = rule_of_text("n c -, o c - -> n o -")
        return choose(product, (image, kernel), ((1024, channels, 64),))

    assert words(chosen(4)) == ["R", "R", "R"]
    assert chosen(4).replicates
    assert words(chosen(4096)) == ["S(1)", "S(1)", "P(sum)"]
    assert not chosen(4).gathers
    assert not chosen(4096).gathers


def test_an_operator_without_another_dim_gathers():
    chosen = choose(rule_of_text("a - -> a -"), (placed((4, 8), (None, "model")),))
    assert words(chosen) == ["R", "R"]
    assert chosen.gathers


def test_pieces_of_a_weight_are_split_along_their_own_dim():
    bias = Placed((2, 12), Layout(PAIR, ("model", None)), weight=True)
    chosen = choose(rule_of_text("2*a b -> a b, a b"), (bias,))
    assert words(chosen) == ["S(1)", "S(1)", "S(1)"]
    assert not chosen.gathers


def test_no_part_is_empty_on_one_axis_or_on_two():
    assert convolved([Shard(0)], [R], [R], mesh=(4,)) == (["R"] * 4, False)
    assert convolved([Shard(0)], [R], [R], mesh=(3,)) == (["S(0)", "R", "R", "S(0)"], False)

    def on_two(*placements, mesh):
        words, gathers = convolved(*placements, mesh=mesh)
        return words[0], words[1], words[3], gathers

    both = [Shard(0), Shard(0)]
    rows = [both, [R, R], [R, R]]
    assert on_two(*rows, mesh=(2, 2)) == ("S(0) S(0)", "R R", "S(0) S(0)", False)
    assert on_two(*rows, mesh=(3, 2)) == ("S(0) R", "R R", "S(0) R", False)
    channels = [[R, R], both, [R, R]]
    assert on_two(*channels, mesh=(3, 2)) == ("R R", "S(0) S(0)", "S(1) S(1)", False)


@pytest.mark.parametrize(
    ("groups", "per_input", "per_output", "ranks", "inputs", "outputs"),
    [
        (4, 1, 3, 2, [2, 2], [6, 6]),
        (3, 1, 1, 2, [2, 1], [2, 1]),
        (3, 1, 2, 2, [2, 1], [4, 2]),
        # As it comes, the input is split within the second group: 3 and 3 channels.
        (3, 2, 1, 2, [4, 2], [2, 1]),
        # Two groups are too few for four ranks.
        (2, 1, 2, 4, [2] * 4, [4] * 4),
    ],
)
def test_groups_are_not_cut(groups, per_input, per_output, ranks, inputs, outputs):
    channels = layers.Channels(groups, per_input, per_output, transposed=False)
    rule = layers.convolution(channels, 1, bias=False)
    mesh = Mesh((ranks,), ("model",))
    images = placed((2, groups * per_input, 8), (None, "model", None), mesh)
    kernel = placed((groups * per_output, per_input, 3), (None, None, None), mesh)
    chosen = choose(rule, (images, kernel))
    of_images, of_kernel = chosen.operands
    (of_output,) = chosen.results
    output = 2, groups * per_output, 6
    assert [shape[1] for shape in local_shapes(of_images, images.shape)] == inputs
    assert [shape[0] for shape in local_shapes(of_kernel, kernel.shape)] == outputs
    assert [shape[1] for shape in local_shapes(of_output, output)] == outputs
    for local in local_shapes(of_output, output):
        assert chosen.global_shape(rule.results[0], local) == output


def test_a_weight_follows_the_activation():
    # The rows of the activation are split by a factor that the weight lacks. To gather the
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
    # Where the axis splits no activation, the weight stays.
    whole = placed((8, 4), (None, None))
    columns = Layout(PAIR, (None, "model"))
    assert choose(rule, (whole, weight)).operands == (columns, weight.layout)


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


def test_an_activation_that_is_split_by_a_factor_of_the_weight_may_move():
    def targets(rows, inner, columns):
        activation = placed((rows, inner), (None, "model"))
        weight = placed((inner, columns), (None, "model"), weight=True)
        chosen = choose(MATMUL, (activation, weight), ((rows, columns),))
        return [str(layout.placement("model")) for layout in chosen.operands]

    # A small activation is gathered; a large one stays, and the small weight moves.
    assert targets(rows=8, inner=4, columns=60_000) == ["R", "S(1)"]
    assert targets(rows=60_000, inner=40, columns=2) == ["S(1)", "S(0)"]


def test_a_weight_that_is_split_by_the_factor_of_the_activation_stays():
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


def test_a_weight_that_scales_an_activation_of_its_size_that_is_not_split_is_gathered():
    whole = placed((8, 4), (None, None))
    pending = Placed((8, 4), Layout(PAIR, (None, None), {"model": "sum"}))
    weight = placed((8, 4), ("model", None), weight=True)
    both_whole = (Layout.replicated(PAIR, 2),) * 2
    rule = basic.elementwise(((8, 4), (8, 4)))
    for operands in (whole, weight), (weight, whole), (pending, weight):
        chosen = choose(rule, operands, scales=True)
        assert chosen.operands == both_whole
        assert not chosen.gathers


def test_other_weights_that_meet_an_activation_that_is_not_split_stay():
    rule = basic.elementwise(((8, 4), (8, 4)))
    whole = placed((8, 4), (None, None))
    weight = placed((8, 4), ("model", None), weight=True)
    stay = (weight.layout, weight.layout)
    assert choose(rule, (whole, weight)).operands == stay  # it does not scale
    assert choose(rule, (whole, attrs.evolve(weight, weight=False)), scales=True).operands == stay
    assert choose(rule, (attrs.evolve(whole, weight=True), weight), scales=True).operands == stay
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


def test_blocks_stay_through_reshapes_and_arithmetic():
    rows = placed((5, 4), ("model", None))
    flat = movement.reshape((5, 4), (20,))
    chosen = choose(flat, (rows,))
    assert chosen.operands == (rows.layout,)
    (fours,) = chosen.results
    assert fours == Layout(PAIR, ("model",), blocks=(4,))
    assert local_shapes(fours, (20,)) == [(12,), (8,)]

    operands = (Placed((20,), fours), Placed((1,), Layout.replicated(PAIR, 1)))
    chosen = choose(basic.elementwise(((20,), (1,))), operands)
    assert chosen.operands == layouts_of(operands)
    assert chosen.results == (fours,)

    chosen = choose(movement.reshape((20,), (5, 4)), (Placed((20,), fours),))
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
    chosen = choose(found, (Placed(shape, layout),))
    assert chosen.operands == (layout,)
    assert local_shapes(chosen.results[0], target) == parts


def test_factors_that_are_together_in_a_dim_get_their_steps_from_results():
    flat = Placed((12,), Layout(SQUARE, (("data", "model"),), blocks=(Segments(4, outer=1),)))
    apart = rule_of_text("a*b -> a b")
    assert choose(apart, (flat,), ((4, 3),)).results == (Layout(SQUARE, ("data", "model")),)
    for shapes in ((), ((4, 4),)):
        with pytest.raises(LayoutError, match=r"'a\*b -> a b' has no steps for .* \[\(12,\)\]"):
            choose(apart, (flat,), shapes)


def test_chunks_of_whole_steps_by_two_axes_are_not_moved_though_a_block_is_less_than_a_step():
    # Chunks of 6, 6 and 3 steps of 4, twice: the least block of these is 6, which is no whole step.
    layout = Layout(Mesh((2, 3), ("data", "model")), (("data", "model"),), blocks=(12,))
    layout = layout.normalized((120,))
    chosen = choose(movement.reshape((120,), (30, 4)), (Placed((120,), layout),))
    assert chosen.operands == (layout,)
    assert local_shapes(chosen.results[0], (30, 4)) == [(6, 4), (6, 4), (3, 4)] * 2


def test_a_dim_whose_chunks_are_no_whole_steps_is_split_between_steps():
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


def test_axes_that_split_a_dim_keep_their_order():
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
def test_of_splits_of_equal_cost_that_of_the_first_operand_is_chosen(turned):
    rows, columns = placed((8, 8), ("model", None)), placed((8, 8), (None, "model"))
    first, second = (columns, rows) if turned else (rows, columns)
    chosen = choose(basic.elementwise(((8, 8), (8, 8))), (first, second))
    assert chosen.operands == (first.layout, first.layout)


TIES = """
from shardcore.domain.layout import Layout
from shardcore.domain.mesh import Mesh
from shardcore.domain.rules.basic import elementwise
from shardcore.domain.planner.call import Placed
from shardcore.domain.planner.choice import choose

mesh = Mesh((2, 2), ("data", "model"))
specs = [("data", "model", None), (None, "data", "model"), ("model", None, "data")]
operands = tuple(Placed((4, 4, 4), Layout(mesh, spec)) for spec in specs)
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
def test_no_other_split_is_cheaper(data):
    """As `plan` brings each tensor from one layout to the other, operands and gradients."""
    rule = layers.convolution_backward(ONE_GROUP, 1)
    image, kernel = (data.draw(st.sampled_from([2, 400, 20_000])) for _ in range(2))
    shapes = (8, 6, image), (8, 4, image), (6, 4, kernel)
    splits = [R, P, *(Shard(dim, block) for dim in (0, 1) for block in (1, 2, 3))]
    sources = [
        Layout.from_placements(PAIR, [data.draw(st.sampled_from(splits))], 3).normalized(shape)
        for shape in shapes
    ]
    results = (*shapes[1:], (6,))
    candidates = {
        (rule.operands[number].dims[placement.dim].factor, placement.block)
        for number, placement in enumerate(layout.placement("model") for layout in sources)
        if isinstance(placement, Shard)
    }

    def split(term, shape, factor, block):
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
        return tuple(split(term, shape, *candidate) for term, shape in terms)

    def total(candidate):
        found = sum(map(cost, shapes, sources, operands_of(candidate)))
        for term, shape in zip(rule.results, results, strict=True):
            layout = split(term, shape, *candidate)
            like = layout if term.like is None else sources[term.like]
            found += cost(shape, layout, like.reduced)
        return found

    operands = tuple(map(Placed, shapes, sources))
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
