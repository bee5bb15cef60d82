"""Policy `hybrid_sharded`: shards over one axis, kernels over the next, nothing over the first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.spec import entry_axes
from shardcore.policies import tensor_parallel
from shardcore.policies.data_parallel import plan_fully_sharded, plan_hybrid_sharded
from shardcore.ports.policy import LayerFacts, VariableFacts

MESH = Mesh((2, 4, 2), ("replica", "shard", "model"))


def dense(name, inputs, outputs):
    variables = (
        VariableFacts(f"{name}/kernel", (inputs, outputs), 4),
        VariableFacts(f"{name}/bias", (outputs,), 4),
    )
    return LayerFacts(name, ("Dense", "Layer"), variables=variables)


def mlp(width=64):
    layers = (dense("up", 32, width), dense("down", width, 32))
    feeds = (("up", "down"),)
    return LayerFacts("mlp", ("Functional",), children=layers, feeds=feeds, outputs=("down",))


def specs(model, mesh, **options):
    return {k: c.spec for k, c in plan_hybrid_sharded(model, mesh, small=0, **options).items()}


def test_kernels_are_sharded_over_both_axes_and_biases_over_one():
    assert specs(mlp(), MESH) == {
        "up/kernel": ("shard", "model"),
        "up/bias": ("model",),  # it has one dim
        "down/kernel": ("model", "shard"),
        "down/bias": ("shard",),
    }


@given(st.integers(1, 40))
def test_without_a_model_axis_it_is_fully_sharded_over_its_axis(width):
    mesh = Mesh((2, 4), ("replica", "shard"))
    chosen = plan_hybrid_sharded(mlp(width), mesh, small=0)
    assert chosen == plan_fully_sharded(mlp(width), mesh, axis="shard", small=0)


@given(st.integers(1, 40))
def test_the_model_axis_shards_what_tensor_parallel_shards(width):
    within = tensor_parallel.plan(mlp(width), MESH, axis="model", small=0)
    for path, spec in specs(mlp(width), MESH).items():
        used = [axis for entry in spec for axis in entry_axes(entry)]
        assert "replica" not in used
        assert [a if a == "model" else None for a in spec] == list(within[path].spec)


def test_the_reason_has_both():
    chosen = plan_hybrid_sharded(mlp(), MESH, small=0)
    reason = "columns: down sums up (by graph); dim 0 sharded"
    assert chosen["up/kernel"].reason == reason
    assert chosen["down/bias"].reason == "dim 0 sharded"


@pytest.mark.parametrize(("mesh", "shard"), [(Mesh((4,), ("data",)), None), (MESH, "replica")])
def test_an_axis_of_replicas_is_needed(mesh, shard):
    with pytest.raises(PolicyError, match="needs an axis of replicas and behind it one of shards"):
        plan_hybrid_sharded(mlp(), mesh, shard=shard)
