"""Policy `per_layer`, and the groups of layers that a search lays out together."""

from itertools import pairwise

import pytest

from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies import per_layer
from shardcore.policies.data_parallel import plan_hybrid_sharded
from shardcore.policies.regions import layer_groups
from shardcore.ports.policy import LayerFacts, VariableFacts

MESH = Mesh((2, 4, 2), ("replica", "shard", "model"))


def dense(name, inputs, outputs, path=None):
    path = path or name
    kernel = VariableFacts(f"{path}/kernel", (inputs, outputs), 4)
    return LayerFacts(name, ("Dense", "Layer"), variables=(kernel,), path=path)


def mlp(*layers, name="mlp", path=""):
    names = [each.name for each in layers]
    feeds = tuple(pairwise(names))
    return LayerFacts(
        name, ("Functional",), children=layers, feeds=feeds, outputs=(names[-1],), path=path
    )


def chain():
    """A pair, and a layer of another width."""
    return mlp(dense("up", 32, 64), dense("down", 64, 32), dense("last", 32, 24))


def specs(model, mesh=MESH, **options):
    return {
        path: each.spec for path, each in per_layer.plan(model, mesh, small=0, **options).items()
    }


def test_each_layer_has_the_layout_of_its_policy():
    layers = {"up": "tensor_parallel", "last": "fully_sharded"}
    assert specs(chain(), layers=layers) == {
        "up/kernel": (None, "model"),
        "down/kernel": (None, None),
        "last/kernel": ("shard", None),
    }
    all_hybrid = specs(chain(), otherwise="hybrid_sharded")
    expected = plan_hybrid_sharded(chain(), MESH, small=0)
    assert all_hybrid == {path: each.spec for path, each in expected.items()}


def test_a_pattern_gives_a_policy_to_all_that_a_layer_holds_and_an_inner_layer_has_precedence():
    blocks = [
        mlp(
            dense(f"up_{n}", 32, 64, f"block_{n}/up"),
            dense(f"down_{n}", 64, 32, f"block_{n}/down"),
            name=f"block_{n}",
            path=f"block_{n}",
        )
        for n in range(2)
    ]
    layers = {r"block_\d+": "fully_sharded", r"block_\d+/down": "data_parallel"}
    assert specs(mlp(*blocks), layers=layers) == {
        f"block_{n}/{name}/kernel": spec
        for n in range(2)
        for name, spec in (("up", (None, "shard")), ("down", (None, None)))
    }


def test_the_reason_names_the_policy():
    chosen = per_layer.plan(chain(), MESH, layers={"last": "fully_sharded"}, small=0)
    assert chosen["last/kernel"].reason == "fully_sharded: dim 0 sharded"
    why = "data_parallel: replicated: gradients are summed over 'replica' and 'shard'"
    assert chosen["up/kernel"].reason == why


@pytest.mark.parametrize(
    ("mesh", "options", "text"),
    [
        (Mesh((4,), ("data",)), {}, r"takes a mesh \(replica, shard\)"),
        (MESH, {"layers": {"up": "auto"}}, "up: on mesh .* a layer has one of data_parallel, "),
        (MESH, {"otherwise": "x"}, "otherwise=: .*got 'x'"),
        (Mesh((2, 2), ("replica", "shard")), {"otherwise": "tensor_parallel"}, "one of data_par"),
        (MESH, {"layers": {"upp": "fully_sharded"}}, "no layer has the path 'upp'; there are up, "),
    ],
)
def test_wrong_input_is_an_error_with_what_there_is(mesh, options, text):
    with pytest.raises(PolicyError, match=text):
        per_layer.plan(chain(), mesh, **options)


def test_layers_of_a_pair_and_blocks_in_a_row_are_in_one_group():
    assert layer_groups(chain()) == (("up", "down", "last"),)
    inner = mlp(dense("a", 8, 4, "net/a"), dense("b", 5, 4, "net/b"), name="net", path="net")
    relu = LayerFacts("relu", ("ReLU",), path="relu")
    assert layer_groups(mlp(inner, relu)) == (("net/a",), ("net/b",))


def test_layers_with_one_name_are_in_no_group():
    inner = mlp(dense("a", 8, 4, "net/a"), dense("b", 5, 4, "net/b"), name="net", path="net")
    assert layer_groups(mlp(inner, dense("a", 4, 9))) == (("net/b",),)
