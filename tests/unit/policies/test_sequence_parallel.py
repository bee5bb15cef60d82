"""Policy `sequence_parallel`: where the sequence is sharded, where all-gathered, where neither."""

from itertools import pairwise

import pytest

from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies import sequence_parallel, tensor_parallel
from shardcore.ports.policy import LayerFacts
from tests.unit.policies.facts import (
    attention,
    block,
    chain,
    conv,
    dense,
    functional,
    layer,
    norm,
    on_tokens,
    plain,
)  # fmt: skip

MESH = Mesh((2, 4), ("data", "model"))
PARTS, GATHERED = ("data", "model", None), ("data", None, None)


def outputs(model, mesh=MESH, **options):
    """The rules for outputs, by the layer's path. Those for variables are `tensor_parallel`'s."""
    chosen = sequence_parallel.plan(model, mesh, small=0, **options)
    found = {each.output_path for each in model.layers()} - {""}
    variables = {path: each for path, each in chosen.items() if path not in found}
    axis = {key: value for key, value in options.items() if key == "axis"}
    assert variables == tensor_parallel.plan(model, mesh, small=0, **axis)
    return {
        path.removesuffix("/output"): each.spec for path, each in chosen.items() if path in found
    }


def up(path="up"):
    return on_tokens(dense(path, 8, 32, "gelu"))


def down(path="down"):
    return on_tokens(dense(path, 32, 8), None, 6, 32)


def tokens(path="tokens", *shape):
    return on_tokens(layer(path, "Embedding", {"embeddings": (64, 8)}), *(shape or (None, 6)))


def token_norm(path):
    return on_tokens(norm(path, 8))


def heads(path="heads", count=4):
    return attention(path, 8, count, count, 2)


def add(name):
    return plain(name, "Add")


HEAD = on_tokens(dense("head", 8, 64))
ATTENDS = {"heads/attention_output": PARTS}


def pre_norm(*after, first=None):
    """A block of a functional model: `after` takes the second sum."""
    nodes = [
        first or tokens(), token_norm("n1"), heads(), add("sum_1"), token_norm("n2"), up(), down(),
        add("sum_2"), *after,
    ]  # fmt: skip
    start = nodes[0].name
    feeds = [
        (start, "n1"), ("n1", "heads"), (start, "sum_1"), ("heads", "sum_1"), ("sum_1", "n2"),
        ("n2", "up"), ("up", "down"), ("sum_1", "sum_2"), ("down", "sum_2"),
    ]  # fmt: skip
    names = ["sum_2", *(each.name for each in after)]
    return functional(nodes, [*feeds, *pairwise(names)])


INSIDE = {"n1": GATHERED, "heads/attention_output": PARTS, "n2": GATHERED, "down": PARTS}

# --- in a graph -----------------------------------------------------------------------------------


def test_sums_are_scattered_and_norms_are_gathered_once():
    model = pre_norm(token_norm("last"), HEAD)
    assert outputs(model) == {"tokens": PARTS, **INSIDE, "last": GATHERED}


def test_the_reasons_name_the_output_and_its_use():
    chosen = sequence_parallel.plan(pre_norm(token_norm("last"), HEAD), MESH, small=0)
    assert {path: chosen[f"{path}/output"].reason for path in ("tokens", "down", "n2")} == {
        "tokens": "parts of the sequence: a rank looks up all tokens and keeps its own",
        "down": "parts of the sequence: a rank keeps the sums of its tokens",
        "n2": "gathered once, for up",
    }


def test_a_layer_in_between_computes_its_shard_of_the_tokens():
    model = pre_norm(plain("drop", "Dropout"), token_norm("last"), plain("act", "ReLU"))
    assert outputs(model) == {"tokens": PARTS, **INSIDE}  # the model's output may be sharded


def test_a_sum_that_no_layer_takes_in_shards_is_all_reduced():
    flat = plain("flat", "Flatten")
    assert outputs(chain(plain("x", "InputLayer"), up(), down())) == {}
    assert outputs(chain(plain("x", "InputLayer"), up(), down(), flat, HEAD)) == {}
    assert outputs(chain(tokens(), plain("flat", "Flatten"), HEAD)) == {}


def test_an_operation_has_no_rule_and_is_gathered_by_its_one_user():
    assert outputs(pre_norm(HEAD)) == {"tokens": PARTS, **INSIDE}


def post_norm(p=""):
    nodes = [
        tokens(f"{p}tokens"), heads(f"{p}heads"), add(f"{p}sum_1"), token_norm(f"{p}n1"),
        up(f"{p}up"), down(f"{p}down"), add(f"{p}sum_2"), token_norm(f"{p}n2"),
        on_tokens(dense(f"{p}head", 8, 64)),
    ]  # fmt: skip
    feeds = [
        ("tokens", "heads"), ("tokens", "sum_1"), ("heads", "sum_1"), ("sum_1", "n1"),
        ("n1", "up"), ("up", "down"), ("n1", "sum_2"), ("down", "sum_2"), ("sum_2", "n2"),
        ("n2", "head"),
    ]  # fmt: skip
    return functional(nodes, [(p + one, p + other) for one, other in feeds])


def test_an_output_for_a_region_and_a_short_cut_is_replicated():
    assert outputs(post_norm()) == {}


def test_only_outputs_added_to_such_an_output_are_replicated():
    """Two towers: one has its norms before, the other behind."""
    before, behind = pre_norm(token_norm("last"), HEAD), post_norm("b_")
    both = functional([*before.children, *behind.children], [*before.feeds, *behind.feeds])
    assert outputs(both) == {"tokens": PARTS, **INSIDE, "last": GATHERED}


@pytest.mark.parametrize(
    "between",
    [
        on_tokens(norm("odd", 8, "BatchNormalization")),
        plain("odd", "GlobalAveragePooling1D"),
        on_tokens(layer("odd", "LayerNormalization", {"gamma": (6,)}, axis=[1])),
        on_tokens(layer("odd", "LayerNormalization", {"gamma": (6, 8)}, axis=[1, 2])),
        LayerFacts("odd", ("Activation",), {"activation": "softmax"}),
    ],
    ids=["batch", "pool", "one_dim", "two_dims", "softmax"],
)
def test_a_layer_that_mixes_tokens_gets_all_of_them(between):
    model = pre_norm(plain("drop", "Dropout"), between)
    assert outputs(model) == {"tokens": PARTS, **INSIDE}  # and "drop" is an operation here
    named = pre_norm(layer("drop", "Dropout", {"seed": (2,)}), between)
    assert outputs(named) == {"tokens": PARTS, **INSIDE, "drop": GATHERED}


@pytest.mark.parametrize("axis", [-1, 2, [-1], [2]])
def test_a_norm_over_the_last_dim_computes_its_shard_of_the_tokens(axis):
    last = on_tokens(layer("last", "RMSNormalization", {"scale": (8,)}, axis=axis))
    assert outputs(pre_norm(last, HEAD))["last"] == GATHERED


def test_heads_that_are_not_sharded_leave_the_sequence_full_beside_them():
    odd = pre_norm(token_norm("last"), HEAD)
    nodes = [heads(count=3) if each.name == "heads" else each for each in odd.children]
    # The sum behind it is met by parts of tokens, and cut.
    assert "heads/attention_output" not in outputs(functional(nodes, odd.feeds))


@pytest.mark.parametrize(
    "first", [tokens("tokens", 1, 6), tokens("tokens", 6), plain("x", "InputLayer")]
)
def test_positions_and_inputs_stay_as_they_are(first):
    assert outputs(pre_norm(token_norm("last"), HEAD, first=first)) == {
        "heads/attention_output": PARTS, "n2": GATHERED, "down": PARTS, "last": GATHERED,
    }  # fmt: skip


def test_an_image_is_no_sequence():
    rows = conv("c2", 32, 8)
    model = functional(
        [plain("x", "InputLayer"), conv("c1", 8, 32), rows, add("sum"), plain("act", "ReLU")],
        [("x", "c1"), ("c1", "c2"), ("c2", "sum"), ("x", "sum"), ("sum", "act")],
    )
    assert outputs(model) == {}


# --- where the graph is unknown -------------------------------------------------------------------


def own_block(path="block"):
    parts = token_norm(f"{path}/n1"), heads(f"{path}/heads"), token_norm(f"{path}/n2")
    return block(path, *parts, up(f"{path}/up"), down(f"{path}/down"))


def in_block(path="block"):
    return {f"{path}/{name}": spec for name, spec in INSIDE.items()}


def test_a_block_with_a_norm_for_each_region_takes_parts_and_gives_parts():
    model = chain(tokens(), own_block("b_0"), own_block("b_1"), HEAD)
    assert outputs(model) == {
        "tokens": PARTS, **in_block("b_0"), **in_block("b_1"), "b_1": GATHERED,
    }  # fmt: skip


def test_a_region_may_be_a_layer_of_its_own():
    inner = chain(plain("x", "InputLayer"), up("f/up"), down("f/down"))
    for feeds in (inner.feeds, None):
        forward = LayerFacts("f", ("Feed",), children=inner.children, feeds=feeds, path="f")
        own = block("block", token_norm("n1"), heads(), token_norm("n2"), forward)
        found = outputs(chain(tokens(), own, token_norm("last"), HEAD))
        assert found == {
            "tokens": PARTS, "n1": GATHERED, **ATTENDS, "n2": GATHERED, "f/down": PARTS,
            "last": GATHERED,
        }  # fmt: skip


def test_a_table_of_positions_beside_the_tokens():
    both = block("e", tokens("e/token"), tokens("e/position", 6))
    found = outputs(chain(both, own_block(), token_norm("last"), HEAD))
    assert found == {"e/token": PARTS, **in_block(), "last": GATHERED}


def test_a_block_with_another_number_of_norms_is_left_alone():
    children = own_block().children
    assert outputs(chain(tokens(), block("block", *children[1:]), HEAD)) == {}
    with_head = block("block", *children, HEAD)
    assert outputs(chain(tokens(), with_head, token_norm("last"))) == {}


def test_a_model_of_unknown_graph_is_not_sharded_along_the_sequence():
    model = block("model", tokens(), own_block("b_0"), own_block("b_1"), token_norm("n"), HEAD)
    assert outputs(model) == {
        "tokens": PARTS, **in_block("b_0"), **in_block("b_1"), "n": GATHERED,
    }  # fmt: skip
    assert outputs(block("model", tokens(), token_norm("n"), HEAD)) == {}
    nested = block("outer", model, on_tokens(dense("other", 64, 2)))
    assert outputs(nested) == outputs(model)
    assert outputs(own_block()) == in_block()


# --- axes -----------------------------------------------------------------------------------------


def test_the_axes_that_are_asked_for():
    model = pre_norm(token_norm("last"), HEAD)
    turned = outputs(model, Mesh((2, 2), ("m", "d")), axis="m", batch="d")
    assert turned["down"] == ("d", "m", None)
    assert outputs(model, Mesh((4, 1), ("data", "model"))) == {}
    with pytest.raises(PolicyError, match=r"over 'data', which shards the batch too: give"):
        outputs(model, axis="data")
