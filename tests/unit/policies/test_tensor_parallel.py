"""Policy `tensor_parallel`: heads, experts, embeddings, output layers, and the rest."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports.policy import LayerFacts
from tests.unit.policies.facts import (
    attention,
    block,
    chain,
    dense,
    layer,
    norm,
    plain,
    specs,
)  # fmt: skip
from tests.unit.policies.tensor_plans import plan, reasons


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


def test_projections_without_heads_in_their_shapes_stay_replicated():
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


def test_other_variables_of_a_bank_are_replicated():
    more = {"router": (8, 4), "scale": (8,)}
    assert specs(plan(bank(4, **more))) == specs(plan(bank(4)))


@pytest.mark.parametrize("more", [{"back": (4, 8, 32)}, {"other": (3, 8, 8)}])
def test_a_layer_of_other_shapes_is_no_bank_of_experts(more):
    assert specs(plan(bank(4, **more))) == {}


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
def test_other_output_layers_stay_replicated(last):
    assert specs(plan(chain(plain("x", "InputLayer"), *last))) == {}
    inner = attrs.evolve(chain(norm("ln", 8), dense("inner", 8, 32)), name="inner")
    assert specs(plan(chain(plain("x", "InputLayer"), inner, plain("soft", "Softmax")))) == {}


def test_the_rest_stays_replicated_and_says_why():
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
