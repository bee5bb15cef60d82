"""The planner takes the cheapest sharding of an operator: what stays, moves, and is summed."""

import attrs
import pytest

from shardcore.domain.engine.call import PlacedTensor
from shardcore.domain.engine.choice import choose
from shardcore.domain.engine.rules import layers
from shardcore.domain.engine.rules.rule import rule as rule_of_text
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import Shard
from tests.unit.domain.engine.operands import (
    KERNEL,
    MATMUL,
    ONE_GROUP,
    PAIR,
    P,
    R,
    convolved,
    local_shapes,
    placed,
    words,
)


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


def test_the_factor_that_moves_fewer_bytes_is_sharded():
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
    """The sharding of a product of rows that are sharded by the columns, and a kernel."""
    shape = rows[0], kernel[1]
    given = PlacedTensor(rows, Layout(PAIR, (None, "model")), **facts)
    return choose(MATMUL, (given, placed(kernel, spec, weight=weight)), (shape,))


def test_a_small_activation_is_gathered_where_that_costs_less_than_a_pending_sum():
    small, large, not_sharded = (4, 8), (400_000, 8), (None, None)
    chosen = product(small, (8, 6), not_sharded)
    assert words(chosen) == ["R", "R", "R"]
    assert chosen.replicates
    assert not chosen.gathers
    # The gradient of the kernel has to come back, but the sum is smaller than the rows.
    chosen = product(large, (8, 2), not_sharded)
    assert words(chosen) == ["S(1)", "S(0)", "P(sum)"]
    assert not chosen.replicates


def test_the_way_back_of_a_gradient_counts_by_its_bytes():
    # A sum of 3 columns and the gradient of the kernel are less than 4 rows.
    assert words(product((4, 60), (60, 3), (None, None))) == ["S(1)", "S(0)", "P(sum)"]
    assert words(product((4, 60), (60, 5), (None, None))) == ["R", "R", "R"]


def test_an_expensive_operator_is_sharded_and_a_cheap_one_is_not():
    many, few = (40960, 8192), (40960, 64)
    assert words(product(many, (8192, 8192), (None, None))) == ["S(1)", "S(0)", "P(sum)"]
    assert words(product(few, (64, 8192), (None, None))) == ["R", "R", "R"]


def test_an_activation_is_sharded_for_a_sharded_weight():
    assert words(product((4, 8), (8, 6), ("model", None))) == ["S(1)", "S(0)", "P(sum)"]


def test_rows_of_a_batch_stay_sharded():
    rows, kernel = placed((4, 8), ("model", None)), placed((8, 6), (None, None), weight=True)
    assert words(choose(MATMUL, (rows, kernel), ((4, 6),))) == ["S(0)", "R", "S(0)"]
    # The gradient of a kernel: both operands have rows.
    gradient = placed((4, 6), ("model", None))
    turned = placed((8, 4), (None, "model"))
    assert words(choose(MATMUL, (turned, gradient), ((8, 6),))) == ["S(1)", "S(0)", "P(sum)"]


EXPERTS = rule_of_text("e n k, e k m -> e n m")


def of_experts(given, made, *, activations=(None, "model", None), **facts):
    """The sharding of a product of experts: tokens `(4, 8, given)`, by default sharded."""
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
    # A copy that is sharded by experts is there already.
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


def test_a_sum_over_the_rows_of_a_batch_stays_pending_though_one_operand_is_not_sharded():
    turned, gradient = placed((2, 4), (None, "model")), placed((4, 64), (None, None))
    assert words(choose(MATMUL, (turned, gradient), ((2, 64),))) == ["S(1)", "S(0)", "P(sum)"]


def test_a_view_has_the_layout_of_its_tensor_not_of_a_copy():
    copied = PlacedTensor((4, 6), Layout(PAIR, (None, None)), other=Layout(PAIR, (None, "model")))
    assert words(choose(rule_of_text("a b -> b a"), (copied,))) == ["R", "R"]


def test_a_product_of_full_tensors_is_full_though_a_copy_of_one_is_sharded():
    one_hot = PlacedTensor((4, 6), Layout(PAIR, (None, None)), other=Layout(PAIR, (None, "model")))
    product = rule_of_text("n, n c -> n c")
    assert words(choose(product, (placed((4,), (None,)), one_hot), ((4, 6),))) == ["R", "R", "R"]


def test_an_operand_is_taken_from_where_it_costs_least():
    gradient, rows = placed((4, 6), (None, "model")), (8, 4)

    def chosen(other):
        turned = PlacedTensor(rows, Layout(PAIR, ("model", None)), other=other)
        return words(choose(MATMUL, (turned, gradient), ((8, 6),)))

    assert chosen(None) == ["S(0)", "R", "S(0)"]
    assert chosen(Layout.replicated(PAIR, 2)) == ["R", "S(1)", "S(1)"]


def test_a_dim_that_is_never_sharded_is_gathered():
    assert convolved([Shard(2)], [R], [R]) == (["R"] * 4, False)
    assert convolved([Shard(2)], [R], [R], mesh=(1,)) == (["R"] * 4, False)


def test_another_dim_is_sharded_where_all_of_the_work_costs_more_than_to_bring_it_there():
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


def test_pieces_of_a_weight_are_sharded_along_their_own_dim():
    bias = PlacedTensor((2, 12), Layout(PAIR, ("model", None)), weight=True)
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
        # As it comes, the input is sharded within the second group: 3 and 3 channels.
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
