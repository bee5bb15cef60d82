"""Policy `tensor_parallel`: pairs of layers, one sharded by columns, the next one by rows."""

import attrs
import pytest
from hypothesis import given

from shardcore.ports.policy import LayerFacts
from tests.unit.policies.facts import (
    assert_flows,
    attention,
    block,
    chain,
    conv,
    dense,
    functional,
    layer,
    norm,
    plain,
    specs,
)  # fmt: skip
from tests.unit.policies.tensor_plans import graphs, plan, reasons


def test_columns_then_rows():
    model = chain(plain("x", "InputLayer"), dense("up", 8, 32, "gelu"), dense("down", 32, 8))
    assert specs(plan(model)) == {
        "up/kernel": (None, "model"),
        "up/bias": ("model",),
        "down/kernel": ("model", None),
    }
    assert reasons(model) == {
        "up/kernel": "columns: down sums up (by graph)",
        "up/bias": "columns: down sums up (by graph)",
        "down/kernel": "rows: sums up up (by graph)",
        "down/bias": "replicated: added to the sum",
    }


def test_elementwise_layers_may_stand_between_a_pair():
    between = [plain("act", "ReLU"), norm("bn", 32, "BatchNormalization"), plain("drop", "Dropout")]
    seeded = attrs.evolve(between[2], variables=layer("drop", "Dropout", {"seed": (2,)}).variables)
    model = chain(conv("c1", 4, 32), *between[:2], seeded, conv("c2", 32, 8))
    assert specs(plan(model)) == {
        "c1/kernel": (None, None, None, "model"),
        "c1/bias": ("model",),
        "bn/gamma": ("model",),
        "bn/beta": ("model",),
        "c2/kernel": (None, None, "model", None),
    }


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (norm("ln", 32), "'ln' (LayerNormalization) needs its full output"),
        (plain("flat", "Flatten"), "'flat' (Flatten) needs its full output"),
        (plain("soft", "Softmax"), "'soft' (Softmax) needs its full output"),
        (
            LayerFacts("act", ("Activation",), {"activation": "softmax"}),
            "'act' (Activation) needs its full output",
        ),
        (
            LayerFacts("pool", ("MaxPooling2D",), {"data_format": "channels_first"}),
            "'pool' (MaxPooling2D) needs its full output",
        ),
        (
            attrs.evolve(norm("bn", 32, "BatchNormalization"), config={"axis": 1}),
            "'bn' (BatchNormalization) needs its full output",
        ),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_layers_that_need_all_channels_may_not_stand_between_a_pair(between, why):
    model = chain(dense("up", 8, 32), between, dense("down", 32, 8))
    assert specs(plan(model)) == {}
    assert reasons(model)["up/kernel"] == f"replicated: {why}"
    assert reasons(model)["down/kernel"] == "replicated: its output is one of the model's"


def test_an_activation_that_needs_all_channels():
    model = chain(dense("up", 8, 32, "softmax"), dense("down", 32, 8))
    assert reasons(model)["up/kernel"] == "replicated: softmax needs all its channels"


def test_a_gate_is_sharded_with_what_it_gates():
    layers = [
        plain("x", "InputLayer"), dense("gate", 8, 32, "silu"), dense("up", 8, 32),
        plain("times", "Multiply"), dense("down", 32, 8),
    ]  # fmt: skip
    feeds = [("x", "gate"), ("x", "up"), ("gate", "times"), ("up", "times"), ("times", "down")]
    chosen = specs(plan(functional(layers, feeds)))
    assert chosen.keys() == {"gate/kernel", "gate/bias", "up/kernel", "up/bias", "down/kernel"}
    assert chosen["gate/kernel"] == chosen["up/kernel"] == (None, "model")


def test_a_short_cut_past_the_pair_is_no_hindrance_and_one_into_it_is():
    layers = [
        plain("x", "InputLayer"), dense("up", 32, 32), dense("down", 32, 32), plain("sum", "Add"),
        norm("ln", 32),
    ]  # fmt: skip
    past = [("x", "up"), ("up", "down"), ("down", "sum"), ("x", "sum"), ("sum", "ln")]
    into = [*past, ("up", "sum")]
    assert specs(plan(functional(layers, past))).keys() == {"up/kernel", "up/bias", "down/kernel"}
    assert specs(plan(functional(layers, into))) == {}


def test_a_layer_that_is_called_on_other_inputs_too_is_no_row():
    layers = [plain("x", "InputLayer"), dense("up", 8, 8), dense("down", 8, 8), plain("s", "Add")]
    feeds = [("x", "up"), ("up", "down"), ("x", "down"), ("down", "s")]
    model = functional(layers, feeds)
    assert specs(plan(model)) == {}
    assert reasons(model)["up/kernel"] == (
        "replicated: 'down', which follows, is called on other inputs too"
    )


def test_a_layer_is_part_of_one_pair_and_those_that_save_most_go_first():
    model = chain(dense("a", 4, 16), dense("b", 16, 64), dense("c", 64, 16), dense("d", 16, 4))
    assert specs(plan(model)) == {
        "b/kernel": (None, "model"),
        "b/bias": ("model",),
        "c/kernel": ("model", None),
    }
    assert reasons(model)["a/kernel"] == (
        "replicated: a layer that it would pair with is in another pair"
    )


def test_a_width_that_does_not_divide_and_a_pair_that_is_small_stay_replicated():
    odd = chain(dense("up", 8, 30), dense("down", 30, 8))
    assert specs(plan(odd)) == {}
    assert reasons(odd)["up/kernel"] == "replicated: width 30 does not divide by 4"
    pair = chain(dense("up", 8, 32), dense("down", 32, 8))
    assert specs(plan(pair, small=2048)) != {}
    assert specs(plan(pair, small=2049)) == {}
    assert reasons(pair, small=2049)["up/bias"] == (
        "replicated: the pair has 2048 bytes, fewer than small=2049"
    )


@pytest.mark.parametrize(
    ("kind", "config"),
    [("BaseConv", {"groups": 2}), ("BaseConv", {"data_format": "channels_first"}), ("Conv", {})],
)
def test_convolutions_of_another_kind_are_left_alone(kind, config):
    model = chain(conv("c1", 4, 32, kind, **config), conv("c2", 32, 8))
    assert specs(plan(model)) == {}


@pytest.mark.parametrize(
    ("equation", "is_linear"),
    [("abc,cd->abd", True), ("...x,xy->...y", True), ("ab,ab->ab", False), ("", False)],
)
def test_an_einsum_of_two_letters_is_a_dense_layer(equation, is_linear):
    up = layer("up", "EinsumDense", {"kernel": (8, 32), "bias": (32,)}, equation=equation)
    found = specs(plan(chain(up, dense("down", 32, 8))))
    assert (found.keys() == {"up/kernel", "up/bias", "down/kernel"}) == is_linear


@given(graphs())
def test_in_any_graph_activations_are_sharded_where_they_may_be(model):
    assert_flows(model, plan(model))


def test_pairs_by_order_and_shapes():
    model = block(
        "block", norm("n1", 8), attention("att", 8, 4, 4, 2), norm("n2", 8),
        dense("up", 8, 32, "gelu"), plain("drop", "Dropout"), dense("down", 32, 8),
    )  # fmt: skip
    chosen = specs(plan(model))
    assert {path for path in chosen if not path.startswith("att")} == {
        "up/kernel", "up/bias", "down/kernel",
    }  # fmt: skip
    assert reasons(model)["up/kernel"] == "columns: down sums up (by order and shapes)"
    gated = block("block", dense("gate", 8, 32), dense("up", 8, 32), dense("down", 32, 8))
    assert len(specs(plan(gated))) == 5
    with_norm = block(
        "block", conv("c1", 4, 8), norm("bn", 8, "BatchNormalization"), conv("c2", 8, 4)
    )
    assert specs(plan(with_norm))["bn/gamma"] == ("model",)


@pytest.mark.parametrize(
    ("children", "why"),
    [
        ([dense("a", 8, 8), dense("b", 8, 32)], "by its shape it may be a column or a row"),
        ([dense("a", 8, 32)], "no linear layer follows it in its block"),
        ([dense("a", 8, 32), norm("n", 8), dense("b", 32, 8)], "no linear layer follows it in"),
        ([dense("a", 8, 32), dense("b", 16, 8)], "the next linear layer of its block has another"),
        (
            [dense("a", 8, 32, "softmax"), dense("b", 32, 8)],
            "its activation needs all its channels",
        ),
        ([norm("n", 32), dense("a", 8, 32), dense("b", 32, 8)], "a norm of its width may stand"),
    ],
)
def test_ambiguous_shapes_are_replicated(children, why):
    model = block("block", *children)
    assert specs(plan(model)) == {}
    assert reasons(model)["a/kernel"].startswith(f"replicated: no graph, and {why}")
