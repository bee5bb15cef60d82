import inspect
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain import operator_rules_table as table
from shardcore.domain.errors import LayoutError, RuleError
from shardcore.domain.layout import Layout
from shardcore.domain.mesh import Mesh
from shardcore.domain.operator_rules import Operand, OperatorRule, Result
from shardcore.domain.operator_rules_choice import Placed, split
from shardcore.domain.placements import Partial, Replicate, Shard
from shardcore.domain.redistribution import START_BYTES, plan

DOCS = Path(__file__).parents[3] / "docs" / "operators.md"
ONE_GROUP = table.Channels(1, 4, 6, transposed=False)
CONVOLUTION = table.convolution(ONE_GROUP, 2, bias=True)
EXAMPLES = {
    "convolution": CONVOLUTION,
    "convolution, transposed": table.convolution(
        table.Channels(1, 4, 6, transposed=True), 2, bias=False
    ),
    "convolution, in groups of 2 and 3 channels": table.convolution(
        table.Channels(4, 2, 3, transposed=False), 2, bias=False
    ),
    "convolution_backward": table.convolution_backward(ONE_GROUP, 2),
    "planes": table.planes(4, 2),
    "along": table.along(3, frozenset({1})),
    "unbind": table.unbind(3, 1, 2),
    "index_put, added up": table.index_put(2, indexed=1, accumulates=True),
    "index_put": table.index_put(2, indexed=1, accumulates=False),
    "whole": table.whole((2, 1, 1), 2),
    "im2col": table.im2col(batched=True, window=9),
    "col2im": table.col2im(batched=True, window=9),
    "attention": table.attention("b h", "b -"),
    "attention_backward": table.attention_backward("b h", None),
}
R, P = Replicate(), Partial()
IMAGES, KERNEL, BIAS = (5, 4, 6, 6), (6, 4, 3, 3), (6,)


def convolved(*placements, mesh=(2,), output=(5, 6, 6, 6)):
    """The split of a convolution: factors, operands and result as words."""
    shapes = IMAGES, KERNEL, BIAS
    operands = tuple(map(Placed, shapes, [tuple(each) for each in placements]))
    chosen = split(CONVOLUTION, mesh, operands, (output,))
    words = [" ".join(map(str, each)) for each in (*chosen.operands, *chosen.results)]
    return chosen.factors, words, chosen.gathers


@pytest.mark.parametrize(
    ("placements", "factor", "words"),
    [
        (([R], [R], [R]), None, ["R", "R", "R", "R"]),
        (([Shard(0)], [R], [R]), "n", ["S(0)", "R", "R", "S(0)"]),
        (([R], [Shard(0)], [R]), "o", ["R", "S(0)", "S(0)", "S(1)"]),
        (([R], [R], [Shard(0)]), "o", ["R", "S(0)", "S(0)", "S(1)"]),
        (([R], [Shard(1)], [R]), "c", ["S(1)", "S(1)", "P(sum)", "P(sum)"]),
        (([P], [Shard(0)], [P]), "o", ["R", "S(0)", "S(0)", "S(1)"]),
        (([P], [R], [R]), None, ["R", "R", "R", "R"]),
        (([Shard(2)], [Shard(0)], [R]), "o", ["R", "S(0)", "S(0)", "S(1)"]),
    ],
)
def test_what_is_split_stays_split(placements, factor, words):
    assert convolved(*placements) == ((factor,), words, False)


def test_of_two_factors_the_one_that_moves_less_is_split():
    rule = table.convolution(ONE_GROUP, 2, bias=False)

    def factor(images, kernel, output):
        operands = Placed(images, (Shard(1),)), Placed(kernel, (Shard(0),))
        return split(rule, (2,), operands, (output,)).factors

    kernel = 6, 4, 3, 3
    assert factor((5, 4, 6, 6), kernel, (5, 6, 6, 6)) == ("o",)
    # Of a small output the sum costs less than the gathering of the input.
    large = 5, 4, 600, 600
    assert factor(large, kernel, (5, 6, 600, 600)) == ("o",)
    assert factor(large, kernel, (5, 6, 1, 1)) == ("c",)


def test_a_dim_that_is_never_split_is_gathered_and_told():
    assert convolved([Shard(2)], [R], [R]) == ((None,), ["R"] * 4, True)
    assert convolved([Shard(2)], [R], [R], mesh=(1,)) == ((None,), ["R"] * 4, False)


def test_no_part_is_empty_on_one_axis_or_on_two():
    assert convolved([Shard(0)], [R], [R], mesh=(4,)) == ((None,), ["R"] * 4, True)
    assert convolved([Shard(0)], [R], [R], mesh=(3,))[0] == ("n",)
    both = [Shard(0), Shard(0)]
    assert convolved(both, [R, R], [R, R], mesh=(2, 2))[0] == ("n", "n")
    assert convolved(both, [R, R], [R, R], mesh=(3, 2))[0] == ("n", None)
    assert convolved([R, R], both, [R, R], mesh=(3, 2))[0] == ("o", "o")


@pytest.mark.parametrize(
    ("groups", "per_output", "ranks", "factor"),
    [(4, 3, 2, "g"), (3, 1, 2, "g"), (3, 2, 2, None), (2, 2, 4, None)],
)
def test_groups_are_not_cut(groups, per_output, ranks, factor):
    rule = table.convolution(table.Channels(groups, 1, per_output, transposed=False), 1, bias=False)
    images = Placed((2, groups, 8), (Shard(1),))
    kernel = Placed((groups * per_output, 1, 3), (R,))
    assert split(rule, (ranks,), (images, kernel)).factors == (factor,)


@given(st.data())
def test_no_other_factor_is_cheaper(data):
    """As `plan` counts each redistribution, of the operands and of the gradients."""
    mesh, rule = Mesh((2,), ("model",)), table.convolution_backward(ONE_GROUP, 1)
    image, kernel = (data.draw(st.sampled_from([2, 400, 20_000])) for _ in range(2))
    shapes = (8, 6, image), (8, 4, image), (6, 4, kernel)
    placements = [data.draw(st.sampled_from([R, P, Shard(0), Shard(1)])) for _ in shapes]
    operands = tuple(Placed(s, (p,)) for s, p in zip(shapes, placements, strict=True))
    results = (*shapes[1:], (6,))
    split_by = {
        rule.operands[number].dims[placement.dim].factor
        for number, placement in enumerate(placements)
        if isinstance(placement, Shard)
    }

    def cost(shape, source, target):
        from_, to = (Layout.from_placements(mesh, [each], len(shape)) for each in (source, target))
        steps = [step for step in plan(from_, to, shape, 4) if step.kind != "slice"]
        return sum(START_BYTES + step.bytes_sent(0) for step in steps)

    def total(factor):
        """The cost if all that have `factor` are split by it."""
        splits = [
            Shard(term.dim_of(factor)) if factor in term.factors else R for term in rule.operands
        ]
        found = sum(map(cost, shapes, placements, splits))
        wanted = [R if each is P else each for each in placements[1:]]
        for term, shape, to in zip(rule.results, results, [*wanted, None], strict=True):
            summed = factor in rule.sums(term)
            source = P if summed else Shard(term.dim_of(factor)) if factor in term.factors else R
            target = to or (R if summed else source)
            found += cost(shape, source, target)
        return found

    (chosen,) = split(rule, (2,), operands, results).factors
    assert chosen is None if not split_by else total(chosen) == min(map(total, split_by))


def test_what_cannot_be_a_rule():
    with pytest.raises(RuleError, match="got 'N'"):
        Operand("x", "N c")
    with pytest.raises(RuleError, match="factor twice in 'n n'"):
        Operand("x", "n n")
    x, y = Operand("x", "n c"), Result("y", "n c")
    with pytest.raises(RuleError, match="different names"):
        OperatorRule((x, x), (y,))
    with pytest.raises(RuleError, match=r"names \['z'\]: no such operand"):
        OperatorRule((x,), (Result("y", "n c", of=("z",)),))
    with pytest.raises(RuleError, match=r"has \['o'\], which none"):
        OperatorRule((x,), (Result("y", "n o"),))
    with pytest.raises(RuleError, match=r"added to 'y', which lacks \['c'\]"):
        OperatorRule((x, Operand("b", "c", added=True)), (Result("y", "n"),))


def test_operands_that_do_not_fit_their_rule():
    rule = table.convolution(ONE_GROUP, 1, bias=False)
    images, kernel = Placed((2, 4, 8), (R,)), Placed((6, 4, 3), (R,))
    with pytest.raises(LayoutError, match=r"'input' .* has 3 dims, got shape"):
        split(rule, (2,), (Placed((2, 4), (R,)), kernel))
    with pytest.raises(LayoutError, match=r"'kernel' .* factor 'c' would have to be of 4 steps"):
        split(rule, (2,), (images, Placed((6, 5, 3), (R,))))


def test_the_documentation_has_every_rule():
    rows = [
        "| {} | `{}` | `{}` |".format(name, *str(rule).split(" -> "))
        for name, rule in EXAMPLES.items()
    ]
    wanted = "\n".join(["| rule | operands | results |", "|---|---|---|", *rows])
    assert wanted in DOCS.read_text(), f"docs/operators.md should have this table:\n{wanted}"
    rules = inspect.getmembers(table, lambda each: hasattr(each, "cache_info"))
    assert {name for name, _ in rules} == {name.partition(",")[0] for name in EXAMPLES}
