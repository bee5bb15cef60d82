"""Policy `tensor_parallel`: pairs, heads, embeddings, and what is said of the rest."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.errors import PolicyError
from shardcore.domain.mesh import Mesh
from shardcore.policies import tensor_parallel
from shardcore.ports.model import LayerFacts
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

MESH = Mesh((2, 4), ("data", "model"))


def plan(model, mesh=MESH, small=0, **options):
    return tensor_parallel.plan(model, mesh, small=small, **options)


def reasons(model, **options):
    return {path: each.reason for path, each in plan(model, **options).items()}


# --- pairs in a graph -----------------------------------------------------------------------------


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


def test_a_width_that_does_not_divide_and_a_pair_that_is_small_stay_whole():
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


@st.composite
def graphs(draw):
    """Functional models: a chain of layers of several widths, with gates, short cuts and reuse."""
    nodes = [plain("n0", "InputLayer")]
    widths, feeds = {"n0": 8}, []
    kinds = draw(
        st.lists(st.sampled_from(["dense", "dense", "ReLU", "Add", "LN", "BN"]), min_size=1)
    )
    for kind in [*kinds, "dense"]:
        name, previous = f"n{len(nodes)}", nodes[-1].name
        given = previous if draw(st.integers(0, 4)) else draw(st.sampled_from(nodes)).name
        width = draw(st.sampled_from([8, 16, 16, 30])) if kind == "dense" else widths[given]
        activation = "relu" if draw(st.integers(0, 7)) else "softmax"
        nodes.append(
            {
                "dense": dense(name, widths[given], width, activation),
                "LN": norm(name, width),
                "BN": norm(name, width, "BatchNormalization"),
            }.get(kind, plain(name, kind))
        )
        feeds.append((given, name))
        if kind == "Add" or (kind == "dense" and not draw(st.integers(0, 7))):  # called again
            others = [each for each in widths if widths[each] == widths[given]]
            feeds.append((draw(st.sampled_from(others)), name))
        widths[name] = width
    return functional(nodes, list(dict.fromkeys(feeds)))


@given(graphs())
def test_in_any_graph_activations_are_sharded_where_they_may_be(model):
    assert_flows(model, plan(model))


# --- pairs without a graph ------------------------------------------------------------------------


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


# --- attention ------------------------------------------------------------------------------------


def test_heads_are_sharded_as_megatron_shards_them():
    assert specs(plan(block("block", attention("att", 16, 8, 8, 2)))) == {
        **{f"att/{name}/kernel": (None, "model", None) for name in ("query", "key", "value")},
        **{f"att/{name}/bias": ("model", None) for name in ("query", "key", "value")},
        "att/attention_output/kernel": ("model", None, None),
    }


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 6))
def test_a_head_is_never_cut(key_heads, groups, parts):
    heads = key_heads * groups
    model = block("block", attention("att", 16, heads, key_heads, 3))
    chosen = plan(model, Mesh((1, parts), ("data", "model")))
    for name, count in (("query", heads), ("key", key_heads), ("value", key_heads)):
        kernel, bias = (chosen[f"att/{name}/{each}"].spec for each in ("kernel", "bias"))
        is_sharded = parts > 1 and heads % parts == 0 and count % parts == 0
        assert kernel == (None, "model" if is_sharded else None, None)
        assert bias == ("model" if is_sharded else None, None)
    output = chosen["att/attention_output/kernel"].spec
    assert output == (chosen["att/query/kernel"].spec[1], None, None)


def test_grouped_heads_that_do_not_divide_say_so():
    found = reasons(block("block", attention("att", 16, 12, 3, 2)))
    assert found["att/query/kernel"] == "columns: 12 query heads"
    assert found["att/key/kernel"] == "replicated: 3 key heads do not divide by 4"
    assert found["att/attention_output/kernel"] == "rows: sums up 12 heads over 'model'"
    assert found["att/attention_output/bias"] == "replicated: added to the sum"
    found = reasons(block("block", attention("att", 16, 6, 3, 2)))
    assert set(found.values()) == {"replicated: 6 heads do not divide by 4"}


def test_heads_that_stand_first_in_the_kernel():
    def projection(name, shape, equation):
        return layer(f"att/{name}", "EinsumDense", {"kernel": shape}, equation=equation)

    inputs = [projection(n, (4, 16, 2), "btd,ndh->btnh") for n in ("query", "key", "value")]
    output = projection("attention_output", (4, 2, 16), "btnh,nhd->btd")
    model = block("block", LayerFacts("att", ("GemmaAttention",), children=(*inputs, output)))
    assert set(specs(plan(model)).values()) == {("model", None, None)}


def test_projections_without_heads_in_their_shapes_stay_whole():
    names = ("query", "key", "value", "attention_output")
    children = [dense(f"att/{name}", 16, 16) for name in names]
    model = block("block", LayerFacts("att", ("Attention",), children=tuple(children)))
    assert specs(plan(model)) == {}
    assert reasons(model)["att/query/kernel"] == "replicated: its kernels do not show its heads"


@pytest.mark.parametrize(
    ("names", "widths"),
    [
        (("query_projector", "key_projector", "value_projector", "output_projector"), (16,) * 3),
        (("query", "key", "value", "attention_output"), (16, 8, 8)),
        (("attention_qkv", "attention_proj"), (48,)),
    ],
)
def test_heads_that_the_layer_counts_are_sharded_in_flat_kernels(names, widths):
    *inputs, output = names
    children = [dense(f"att/{n}", 16, width) for n, width in zip(inputs, widths, strict=True)]
    children += [dense(f"att/{output}", 16, 16), dense("att/other", 16, 16)]
    att = LayerFacts("att", ("Attention",), {"num_heads": 8}, children=tuple(children))
    assert specs(plan(block("block", att))) == {
        **{f"att/{name}/kernel": (None, "model") for name in inputs},
        **{f"att/{name}/bias": ("model",) for name in inputs},
        f"att/{output}/kernel": ("model", None),
    }
    assert specs(plan(block("block", att), Mesh((1, 3), ("data", "model")))) == {}


# --- experts --------------------------------------------------------------------------------------


def bank(count, **more):
    shapes = {"up": (count, 8, 32), "up_bias": (count, 32), "down": (count, 16, 8), **more}
    return block("block", layer("bank", "Experts", shapes), dense("router", 8, count))


def test_experts_are_sharded_between_the_ranks():
    assert specs(plan(bank(4))) == {
        "bank/up": ("model", None, None),
        "bank/up_bias": ("model", None),
        "bank/down": ("model", None, None),
    }
    assert reasons(bank(6))["bank/up"] == "replicated: 6 experts do not divide by 4"
    assert reasons(bank(4), small=7000)["bank/up"] == (
        "replicated: the bank has 6656 bytes, fewer than small=7000"
    )


def test_other_variables_of_a_bank_are_whole():
    more = {"router": (8, 4), "scale": (8,)}
    assert specs(plan(bank(4, **more))) == specs(plan(bank(4)))


@pytest.mark.parametrize("more", [{"back": (4, 8, 32)}, {"other": (3, 8, 8)}])
def test_a_layer_of_other_shapes_is_no_bank_of_experts(more):
    assert specs(plan(bank(4, **more))) == {}


# --- embeddings, output layers, norms, and the rest -----------------------------------------------


def table(rows, kind="Embedding"):
    return layer("emb", kind, {"embeddings": (rows, 16)})


@pytest.mark.parametrize(
    ("rows", "small", "spec"),
    [(32, 0, ("model", None)), (33, 0, ("model", None)), (1, 0, ()), (32, 2049, ())],
)
def test_an_embedding_is_sharded_by_rows(rows, small, spec):
    chosen = plan(block("model", table(rows)), small=small)
    assert specs(chosen) == ({"emb/embeddings": spec} if spec else {})
    why = {1: "it has one row", 32: "the table has 2048 bytes, fewer than small=2049"}
    assert bool(spec) or chosen["emb/embeddings"].reason == f"replicated: {why[rows]}"


def test_an_untied_head_is_sharded_by_columns():
    shapes = {"embeddings": (32, 16), "reverse_embeddings": (16, 32)}
    model = block("model", layer("emb", "Embedding", shapes))
    assert specs(plan(model)) == {
        "emb/embeddings": ("model", None),
        "emb/reverse_embeddings": (None, "model"),
    }


def test_an_output_layer_that_makes_more_than_it_takes_is_sharded_by_columns():
    model = chain(plain("x", "InputLayer"), norm("ln", 8), dense("head", 8, 30))
    assert specs(plan(model)) == {"head/kernel": (None, "model"), "head/bias": ("model",)}
    assert specs(plan(model, small=961)) == {}
    pair = chain(plain("x", "InputLayer"), dense("up", 8, 16), dense("down", 16, 24))
    assert specs(plan(pair))["down/kernel"] == ("model", None)
    assert reasons(model, small=961)["head/kernel"] == (
        "replicated: the output layer has 960 bytes, fewer than small=961"
    )


@pytest.mark.parametrize(
    "last",
    [
        [dense("head", 8, 8)],  # its input and its gradient are as large
        [dense("head", 8, 32, "softmax")],
        [dense("head", 8, 32), plain("soft", "Softmax")],
    ],
)
def test_other_output_layers_stay_whole(last):
    assert specs(plan(chain(plain("x", "InputLayer"), *last))) == {}
    inner = attrs.evolve(chain(norm("ln", 8), dense("inner", 8, 32)), name="inner")
    assert specs(plan(chain(plain("x", "InputLayer"), inner, plain("soft", "Softmax")))) == {}


def test_the_rest_stays_whole_and_says_why():
    model = block("model", norm("ln", 8), layer("rnn", "GRUCell", {"kernel": (8, 24)}))
    assert reasons(model) == {
        "ln/gamma": "replicated: a norm sees all channels",
        "ln/beta": "replicated: a norm sees all channels",
        "rnn/kernel": "replicated: GRUCell is not sharded",
    }


def test_models_in_models_are_planned_each():
    inner = chain(dense("inner/up", 8, 32), dense("inner/down", 32, 8))
    outer = chain(
        dense("up", 8, 32), dense("down", 32, 8), attrs.evolve(inner, name="inner"),
        block("block", dense("block/up", 8, 32), dense("block/down", 32, 8)),
    )  # fmt: skip
    assert len(specs(plan(outer))) == 9


def test_the_axis_is_the_last_or_the_one_that_is_asked_for():
    model = chain(dense("up", 8, 32), dense("down", 32, 8))
    assert specs(plan(model, axis="data"))["up/bias"] == ("data",)
    one = plan(model, Mesh((4, 1), ("data", "model")))
    assert specs(one) == {}
    assert one["up/kernel"].reason == "replicated: axis 'model' has one rank"
    with pytest.raises(PolicyError, match=r"has one axis: make it DeviceMesh\(\(1, 8\), \('d', 'm"):
        plan(model, Mesh((8,), ("d",)))
