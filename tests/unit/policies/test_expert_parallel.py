"""Policy `expert_parallel`: which variables are experts, and over which axis they are sharded."""

import pytest

from shardcore.domain.errors import MeshError, PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies import data_parallel, expert_parallel
from shardcore.policies.data_parallel import plan_fully_sharded
from tests.unit.policies.facts import block, dense, layer

ROWS = Mesh((4,), ("data",))
GROUPS = Mesh((2, 4), ("data", "expert"))


def moe(experts=4, **more):
    shapes = {"router": (8, experts), "up": (experts, 8, 32), "up_bias": (experts, 32)}
    return block(
        "block", dense("in", 8, 8), layer("moe", "Moe", shapes | more | {"down": (experts, 32, 8)})
    )


def specs(model, mesh, **options):
    """The specs of what is sharded."""
    chosen = expert_parallel.plan(model, mesh, **{"small": 0, **options})
    assert chosen.keys() == {each.path for each in model.all_variables()}
    return {path: choice.spec for path, choice in chosen.items() if any(choice.spec)}


def over(axis):
    kernels = dict.fromkeys(("moe/up", "moe/down"), (axis, None, None))
    return kernels | {"moe/up_bias": (axis, None)}


@pytest.mark.parametrize(
    ("mesh", "options", "axis"),
    [
        (ROWS, {}, "data"),
        (GROUPS, {}, "expert"),
        (GROUPS, {"axis": "data"}, "data"),
        (Mesh((4, 1), ("data", "model")), {}, "data"),
        (Mesh((2, 2, 2), ("data", "expert", "model")), {}, "expert"),
    ],
)
def test_experts_are_sharded_over_an_axis_of_the_batch_and_the_rest_is_replicated(
    mesh, options, axis
):
    assert specs(moe(), mesh, **options) == over(axis)
    chosen = expert_parallel.plan(moe(), mesh, small=0, **options)
    assert chosen["moe/up"].reason == (
        f"experts: a rank computes its own, tokens are exchanged over {axis!r}"
    )
    if mesh == ROWS:
        assert chosen["in/kernel"] == data_parallel.plan(moe(), mesh)["in/kernel"]


def test_other_variables_may_be_sharded():
    by_data = plan_fully_sharded(moe(), GROUPS, axis="data", small=0)
    found = expert_parallel.plan(moe(), GROUPS, shard="data", small=0)
    for path, choice in found.items():
        assert choice.spec == over("expert").get(path, by_data[path].spec)
    assert found["in/kernel"].spec == ("data", None)


@pytest.mark.parametrize(
    ("experts", "mesh", "options", "reason"),
    [
        (6, ROWS, {}, "experts, unevenly: a rank computes its own, tokens are exchanged over"),
        (3, ROWS, {}, "replicated: 3 experts are fewer than the 4 ranks along 'data'"),
        (4, Mesh((1,), ("data",)), {}, "replicated: axis 'data' has one rank"),
        (4, ROWS, {"small": 9000}, "replicated: the bank has 8704 bytes, fewer than small=9000"),
    ],
)
def test_a_bank_that_is_not_sharded_evenly_says_why(experts, mesh, options, reason):
    chosen = expert_parallel.plan(moe(experts), mesh, **{"small": 0, **options})
    assert chosen["moe/up"].reason.startswith(reason)
    assert any(chosen["moe/up"].spec) == ("tokens" in reason)


def einsum(equation, shape=(4, 8, 32)):
    kernel = {"kernel": shape, "bias": (shape[0], 1, shape[-1]), "last": shape[-1:]}
    return block("block", layer("up", "EinsumDense", kernel, equation=equation))


def test_an_einsum_of_each_experts_tokens_is_sharded():
    sharded = {"up/kernel": ("data", None, None), "up/bias": ("data", None, None)}
    assert specs(einsum("gecd,edh->gech"), ROWS) == sharded
    assert specs(einsum("gech,edh->gecd"), ROWS) == sharded


@pytest.mark.parametrize(
    "model",
    [
        block("block", dense("in", 8, 8)),
        einsum("abc,cde->abde"),  # the heads of an attention
        einsum("abcd,cde->abe"),
        einsum("ab,bc->ac", (4, 8)),
        einsum("", (4, 8, 32)),
        block("block", layer("moe", "Moe", {"up": (4, 8, 32)})),
        block("block", layer("moe", "Moe", {"up": (4, 8, 32), "down": (4, 16, 16)})),
    ],
)
def test_a_model_without_experts_is_an_error(model):
    with pytest.raises(PolicyError, match="'expert_parallel' finds no experts in the model"):
        expert_parallel.plan(model, ROWS)


def test_an_axis_that_shards_no_batch_is_an_error():
    mesh = Mesh((2, 2, 2), ("data", "expert", "model"))
    with pytest.raises(PolicyError, match=r"one of \['data', 'expert'\], got 'model'"):
        expert_parallel.plan(moe(), mesh, axis="model")
    with pytest.raises(MeshError, match="'experts'"):
        expert_parallel.plan(moe(), mesh, axis="experts")


def test_a_router_as_wide_as_its_experts_are_many_is_replicated():
    shapes = {"router": (4, 4), "up": (4, 4, 4), "up_bias": (4, 4), "down": (4, 4, 4)}
    model = block("block", layer("moe", "Moe", shapes))
    assert specs(model, ROWS) == {
        "moe/up": ("data", None, None), "moe/down": ("data", None, None),
    }  # fmt: skip
