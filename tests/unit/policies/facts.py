"""Models as policies see them, written by hand, and the result of a plan for one."""

import itertools
from collections.abc import Mapping

import attrs

from shardcore.policies.linear import as_linear
from shardcore.policies.regions import Graph
from shardcore.ports.policy import Choice, LayerFacts, VariableFacts

CHANNELWISE = ("ReLU", "BatchNormalization", "Add")


def layer(path: str, kind: str, shapes: Mapping[str, tuple[int, ...]], **config) -> LayerFacts:
    variables = tuple(VariableFacts(f"{path}/{name}", shape) for name, shape in shapes.items())
    return LayerFacts(path.rpartition("/")[2], (kind,), config, variables, path=path)


def on_tokens(layer: LayerFacts, *shape: int | None) -> LayerFacts:
    """`layer`, built for sequences."""
    return attrs.evolve(layer, input_shape=shape or (None, 6, 8))


def dense(path: str, given: int, made: int, activation: str = "linear") -> LayerFacts:
    shapes = {"kernel": (given, made), "bias": (made,)}
    return layer(path, "Dense", shapes, activation=activation)


def conv(path: str, given: int, made: int, kind: str = "BaseConv", **config) -> LayerFacts:
    shapes = {"kernel": (3, 3, given, made), "bias": (made,)}
    return layer(path, kind, shapes, activation="relu", **config)


def norm(path: str, width: int, kind: str = "LayerNormalization") -> LayerFacts:
    return layer(path, kind, {"gamma": (width,), "beta": (width,)}, axis=-1)


def plain(path: str, kind: str) -> LayerFacts:
    return LayerFacts(path.rpartition("/")[2], (kind,))


def attention(path: str, width: int, heads: int, key_heads: int, size: int) -> LayerFacts:
    def projection(name: str, count: int) -> LayerFacts:
        shapes = {"kernel": (width, count, size), "bias": (count, size)}
        return layer(f"{path}/{name}", "EinsumDense", shapes, equation="bqm,muh->bquh")

    output = {"kernel": (heads, size, width), "bias": (width,)}
    children = (
        projection("query", heads),
        projection("key", key_heads),
        projection("value", key_heads),
        layer(f"{path}/attention_output", "EinsumDense", output, equation="bquh,uhm->bqm"),
    )
    name = path.rpartition("/")[2]
    return LayerFacts(name, ("GroupedQueryAttention",), children=children, path=path)


def block(path: str, *children: LayerFacts) -> LayerFacts:
    """A layer whose graph is unknown."""
    return LayerFacts(path, ("Block",), children=children, path=path)


def chain(*children: LayerFacts) -> LayerFacts:
    """A sequential model."""
    names = [each.name for each in children]
    return functional(children, itertools.pairwise(names))


def functional(children, feeds) -> LayerFacts:
    """A functional model; its last child gives its output."""
    outputs = (children[-1].name,)
    return LayerFacts(
        "model", ("Functional",), children=tuple(children), feeds=tuple(feeds), outputs=outputs
    )


def specs(chosen: Mapping[str, Choice]) -> dict[str, tuple]:
    """The specs that shard a variable, by path."""
    return {path: each.spec for path, each in chosen.items() if any(each.spec)}


def assert_flows(model: LayerFacts, chosen: Mapping[str, Choice]) -> None:
    """No layer of a functional model meets an activation that is sharded where it needs it in full.

    Written against what the layers compute, not against how the policy finds it.
    """
    graph = Graph.of(model)
    is_sharded: dict[str, bool] = {}
    for node in model.children:
        given = {is_sharded[name] for name in graph.producers[node.name]}
        assert len(given) < 2, f"{node.name} meets a sharded and a full activation"
        is_sharded[node.name] = _output_is_sharded(node, True in given, chosen)
    for name in model.outputs:  # a sharded output is of the layer that gives it, and makes it wider
        linear = as_linear(graph.nodes[name])
        assert not is_sharded[name] or (linear and linear.width_out > linear.width_in)


def _output_is_sharded(node: LayerFacts, given: bool, chosen: Mapping[str, Choice]) -> bool:
    if node.kind in CHANNELWISE:
        for each in node.variables:
            assert any(chosen[each.path].spec) == given, f"{each.path} is not as its input"
        return given
    linear = as_linear(node)
    if linear is None:
        assert not given, f"{node.name} needs its full input"
        return False
    spec = chosen[linear.path].spec
    assert bool(spec[-2]) == given, f"{node.name}: rows are sharded where its input is, {spec}"
    assert not (spec[-2] and spec[-1]), f"{node.name} is sharded twice"
    if spec[-1]:
        assert node.config["activation"] != "softmax"
    assert linear.bias is None or chosen[linear.bias.path].spec == (spec[-1],)
    return bool(spec[-1])
