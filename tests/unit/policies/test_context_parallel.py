"""Policy `context_parallel`: where the sequence is sharded, and how variables are stored."""

import attrs
import pytest

from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies import context_parallel, data_parallel, tensor_parallel
from shardcore.policies.data_parallel import plan_fully_sharded
from tests.unit.policies.facts import attention, chain, dense, layer, norm, on_tokens, plain

MESH = Mesh((2, 4), ("data", "seq"))


def given(name, *shape):
    return attrs.evolve(plain(name, "InputLayer"), input_shape=shape, path=name)


def embedding(*shape):
    return on_tokens(layer("embedding", "Embedding", {"embeddings": (64, 8)}), *shape)


def token_norm(path):
    return on_tokens(norm(path, 8))


DECODER = chain(
    given("tokens", None, 6), embedding(None, 6), token_norm("n1"), attention("heads", 8, 4, 4, 2),
    token_norm("n2"), on_tokens(dense("up", 8, 64)),
)  # fmt: skip


def outputs(model, **options):
    """The specs of the rules for outputs, by the layer's path."""
    chosen = context_parallel.plan(model, MESH, **options)
    found = {each.output_path for each in model.layers()} - {""}
    return {path.removesuffix("/output"): chosen[path].spec for path in found & chosen.keys()}


def test_inputs_embeddings_and_norms_have_the_sequence_sharded():
    assert outputs(DECODER) == {
        "tokens": ("data", "seq"),
        "embedding": ("data", "seq", None),
        "n1": ("data", "seq", None),
        "n2": ("data", "seq", None),
    }


def test_only_inputs_that_have_a_sequence_are_sharded():
    model = chain(
        given("tokens", None, 6), given("padding", None, 6), given("features", None, 9),
        given("frames", None, 6, 8), given("images", None, 6, 6, 3), embedding(None, 6),
    )  # fmt: skip
    assert outputs(model).keys() == {"tokens", "padding", "frames", "embedding"}


def test_a_norm_of_other_dims_and_a_table_of_positions_stay():
    model = chain(
        attrs.evolve(norm("pooled", 8), input_shape=(None, 8)),
        attrs.evolve(norm("heads", 8), input_shape=(None, 6, 4, 8)),
        embedding(1, 6),
    )
    with pytest.raises(PolicyError, match="finds no sequence in the model"):
        outputs(model)


def test_variables_are_replicated_or_sharded_over_an_axis():
    replicated = context_parallel.plan(DECODER, MESH)
    assert {path: replicated[path].spec for path in data_parallel.plan(DECODER, MESH)} == {
        path: each.spec for path, each in data_parallel.plan(DECODER, MESH).items()
    }
    sharded = context_parallel.plan(DECODER, MESH, shard="seq", small=0)
    expected = plan_fully_sharded(DECODER, MESH, axis="seq", small=0)
    assert {path: sharded[path] for path in expected} == expected
    assert any("seq" in each.spec for each in expected.values())


def test_an_axis_of_one_rank_shards_nothing():
    chosen = context_parallel.plan(DECODER, Mesh((8, 1), ("data", "seq")))
    assert not any(any(each.spec) for each in chosen.values())


def test_the_sequence_and_the_batch_need_separate_axes():
    with pytest.raises(PolicyError, match="'context_parallel' needs an axis beside"):
        context_parallel.plan(DECODER, Mesh((8,), ("data",)))
    with pytest.raises(PolicyError, match="which shards the batch too"):
        context_parallel.plan(DECODER, MESH, axis="data")


def test_pairs_and_heads_are_sharded_over_an_axis_of_their_own():
    mesh = Mesh((1, 2, 2), ("data", "seq", "model"))
    chosen = context_parallel.plan(DECODER, mesh, tensor="model", small=0)
    expected = tensor_parallel.plan(DECODER, mesh, axis="model", small=0)
    assert {path: chosen[path].spec for path in expected} == {
        path: each.spec for path, each in expected.items()
    }
    assert any("model" in each.spec for each in expected.values())
    assert chosen["n1/output"].spec == ("data", "seq", None)


@pytest.mark.parametrize("options", [{"tensor": "data"}, {"tensor": "seq"}, {"shard": "seq"}])
def test_an_axis_that_shards_two_things_is_refused(options):
    mesh = Mesh((1, 2, 2), ("data", "seq", "model"))
    with pytest.raises(PolicyError, match="give `tensor` an axis that shards none of them"):
        context_parallel.plan(DECODER, mesh, axis="seq", **{"tensor": "model"} | options)
