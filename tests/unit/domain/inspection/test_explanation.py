"""The facts of a collective: axes, bytes by theory, reason, and the advice that avoids it."""

import pytest

from shardcore.domain.cost.collectives import (
    ExplainedLayer,
    axes_of,
    merge_equal,
)
from shardcore.domain.cost.reasons import CollectiveFacts, reason
from shardcore.domain.engine.redistribution import plan
from shardcore.domain.inspection import SMALL, advise, rules_as_code
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.variable_size import ShardedVariable

MESH = Mesh((2, 4), ("data", "model"))
REPLICATED = Layout(MESH, (None, None))


@pytest.mark.parametrize(
    ("mesh", "processes", "group", "axes"),
    [
        (MESH, range(8), (0, 4), ("data",)),
        (MESH, range(8), (4, 5, 6, 7), ("model",)),
        (MESH, range(8), range(8), ("data", "model")),
        (MESH, range(8), (0, 5), ()),  # no axis has these ranks
        (MESH, range(8), (0, 1), ()),
        (MESH, [7, 6, 5, 4, 3, 2, 1, 0], (7, 3), ("data",)),
        (Mesh((1, 2), ("data", "model")), range(2), (0, 1), ("model",)),  # the fewest
        (Mesh((2, 2, 2), ("a", "b", "c")), range(8), (0, 1, 4, 5), ("a", "c")),
        (MESH, range(8), (0, 99), ()),
    ],
)
def test_axes_of_a_group(mesh, processes, group, axes):
    assert axes_of(mesh, processes, group) == axes


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Layout(MESH, ("model", None)), REPLICATED),
        (Layout(MESH, ("model", None)), Layout(MESH, (None, "model"))),
        (Layout(MESH, (None, None), {"model": "sum"}), REPLICATED),
        (Layout(MESH, (None, None), {"model": "sum"}), Layout(MESH, ("model", None))),
    ],
)
def test_the_bytes_by_theory_are_those_of_a_redistribution(source, target):
    shape = (8, 16)
    (step,) = plan(source, target, shape, itemsize=4)
    rows, columns = source.local_shape(shape, rank=0)
    assert sent_bytes(step.kind, rows * columns * 4, ranks=4) == step.bytes_sent(rank=0)


def sent_bytes(kind, operand_bytes, ranks):
    made = facts(kind, operand_bytes=operand_bytes, processes=range(ranks))
    return made.collective().sent_bytes


def facts(kind="all_gather", **known):
    common = {"axes": ("model",), "processes": range(4), "operand_bytes": 64, "layer": "down"}
    return CollectiveFacts(**{"kind": kind, **common, **known})


COLUMNS = {"shape": (8, 16), "source": Layout(MESH, ("data", "model")),
           "target": Layout(MESH, ("data", None))}  # fmt: skip
TOKENS = {"shape": (8, 6, 16), "source": Layout(MESH, ("data", "model", None)),
          "target": Layout(MESH, ("data", None, None))}  # fmt: skip
PENDING = Layout(MESH, (None, None), {"model": "sum"})


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (
            facts("all_reduce", reduced=("a/kernel", "a/bias"), phase="backward"),
            "the gradients of a/kernel and 1 more, summed together over axis 'model'",
        ),
        (
            facts("all_reduce", reduced=("loss/total", "loss/count"), phase="loss and metrics"),
            "the new values of loss/total and 1 more, summed together over axis 'model'",
        ),
        (
            facts("reduce_scatter", reduced=("a/kernel",), phase="backward"),
            "the gradient of a/kernel, summed over axis 'model': each rank keeps its shard",
        ),
        (
            facts(variable="a/kernel", axes=("data",), batch_axes=("data",), operator="aten.mm"),
            "a/kernel: sharded over the batch axis 'data', all-gathered for aten.mm",
        ),
        (facts(variable="a/bias"), "a/bias: sharded over axis 'model', all-gathered"),
        (
            facts("all_reduce", source=PENDING, target=REPLICATED, cause="the layer's output:"),
            "the layer's output: a partial sum over axis 'model', reduced",
        ),
        (
            facts(**COLUMNS, cause="the layer's output: rule '.*/output' asks for it,"),
            "the layer's output: rule '.*/output' asks for it, sharded by dim 1 over axis 'model', "
            "all-gathered",
        ),
        (
            facts(**COLUMNS, operator="aten.mm.default"),
            "an operand: sharded by dim 1 over axis 'model', all-gathered for aten.mm.default",
        ),
        (
            facts(operator="aten.lstsq.default", fell_back=True, variable="a"),
            "aten.lstsq.default cannot be sharded for these operands: they are replicated first",
        ),
        (
            facts("all_reduce", operator="aten._local_scalar_dense.default"),
            "a value that is read on the host: a partial value over axis 'model', reduced",
        ),
        (
            facts("all_reduce", phase="backward", source=PENDING, target=REPLICATED),
            "the gradient of the output of down: a partial sum over axis 'model', reduced",
        ),
        (
            facts("reduce_scatter", cause="the new value of bn/mean:", source=PENDING,
                  target=Layout(MESH, ("model", None)), axes=("model",)),
            "the new value of bn/mean: a partial sum over axis 'model', reduced, each rank keeps "
            "its shard of dim 0",
        ),
        (
            facts(cause="what the step returns:"),
            "what the step returns: sharded over axis 'model', all-gathered",
        ),
        (
            facts("all_to_all", operator="aten.cumsum.default", shape=(8, 16),
                  source=Layout(MESH, (None, "model")), target=Layout(MESH, ("model", None))),
            "an operand: sharded by dim 1 over axis 'model', redistributed into shards of dim 0 "
            "for aten.cumsum.default",
        ),
        (
            facts("all_to_all", axes=("data", "model"), shape=(8, 16), variable="a/kernel",
                  source=Layout(MESH, (("data", "model"), None)),
                  target=Layout(MESH, (("model", "data"), None))),
            "a/kernel: sharded by dim 0 over axes 'data', 'model', redistributed into other shards",
        ),
        (
            facts("all_to_all", reduced=("a/kernel",), phase="backward"),
            "the gradient of a/kernel, redistributed to the layout of the variable",
        ),
        (facts("broadcast", axes=()), "a value: sent over a group of processes outside the mesh"),
    ],
)  # fmt: skip
def test_the_reason_in_words(known, words):
    assert reason(known) == words


def layer(path, *variables, spec=("data", None)):
    return ExplainedLayer(path, "Dense", 1, 1, variables, (8, 16), spec)


def variable(path, shape, spec):
    return ShardedVariable(path, shape, spec=spec)


UP = layer("up", variable("up/kernel", (4, 16), (None, "model")), spec=("data", "model"))


def advice(known, *layers):
    found = advise([known], layers)
    return [each.rules for each in found]


def test_a_kernel_sharded_by_columns_is_to_be_sharded_by_rows():
    down = layer(
        "down",
        variable("down/kernel", (16, 16), ("data", "model")),
        variable("down/bias", (16,), ("model",)),
    )
    assert advice(facts(**COLUMNS), UP, down) == [
        {"down/kernel": (("data", "model"), None), "down/bias": (None,)}
    ]


def test_without_a_kernel_for_the_features_the_advice_is_to_replicate_the_last_sharded_layer():
    assert advice(facts(**COLUMNS), UP, layer("down")) == [{"up/kernel": (None, None)}]
    sharded = layer(
        "after", variable("after/kernel", (4, 16), (None, "model")), spec=("model", None)
    )
    assert advice(facts(**COLUMNS), layer("down"), sharded) == []


def test_a_rule_that_gathers_features_is_to_be_taken_out():
    assert advice(facts(**COLUMNS, rule=".*/output"), UP) == [{".*/output": None}]


def test_one_change_at_a_time():
    known = facts(**COLUMNS)
    other = facts(**COLUMNS, operator="aten.add.Tensor")
    assert len(advise([known, other], [UP, layer("down")])) == 1


def test_the_advice_is_to_replicate_all_small_gathered_variables():
    small = [variable(f"a/{n}", (8, 8), ("model", "data")) for n in range(2)]
    large = variable("a/large", (SMALL, 8), ("model", None))
    known = [facts(variable=each.path) for each in (*small, large)]
    (found,) = advise(known, [layer("a", *small, large)])
    assert found.rules == {"a/0": (None, "data"), "a/1": (None, "data")}
    assert "a/0 and 1 more small variables are sharded over 'model'" in found.problem
    assert found.effect.startswith(f"each rank keeps {2 * 8 * 8 * 4 * 3 // 4} bytes more")


@pytest.mark.parametrize(
    "known",
    [
        facts("all_reduce", source=PENDING, target=REPLICATED),  # what a sharded kernel costs
        facts(**COLUMNS, phase="backward"),
        facts(**{**COLUMNS, "axes": ("data",)}, batch_axes=("data",)),
        facts(**COLUMNS, reduced=("up/kernel",)),
        facts(**TOKENS, rule="norm/output"),  # once, for several products
    ],
)
def test_no_advice_is_given_where_no_rule_avoids_a_collective(known):
    assert advice(known, UP, layer("down")) == []


def test_the_rules_as_they_are_written():
    rules = {"a/kernel": ("model", None), ".*/output": None}
    assert (
        rules_as_code(rules)
        == "layout_map['a/kernel'] = ('model', None); take out the rule '.*/output'"
    )
    many = rules_as_code({str(number): (None,) for number in range(6)})
    assert many.endswith("layout_map['3'] = (None,); and 2 more alike")


def test_equal_collectives_are_listed_once_with_a_count():
    one, other = facts().collective(), facts(layer="up").collective()
    assert [(each.layer, each.times) for each in merge_equal([one, other, one])] == [
        ("down", 2),
        ("up", 1),
    ]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_an_all_gather_and_a_reduce_scatter_send_what_an_all_reduce_sends(ranks):
    full = 4 * 8 * 16 * 32
    pair = sent_bytes("all_gather", full // ranks, ranks) + sent_bytes(
        "reduce_scatter", full, ranks
    )
    assert pair == sent_bytes("all_reduce", full, ranks)
