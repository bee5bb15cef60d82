"""Roles of layers for a sharded sequence: they shard it, pass parts on, or need it in full.

A role depends on the kind of the layer and on the sharding of its variables by `tensor_parallel`.
In a model with a graph, the roles decide which outputs are sharded and which are all-gathered.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, TypeAlias

import attrs

from shardcore.policies.attention import attentions
from shardcore.policies.linear import CHANNELWISE, as_linear, is_channelwise
from shardcore.policies.regions import Graph, graph_heads
from shardcore.ports.policy import Choice, LayerFacts

# An embedding of tokens; another one, such as a table of positions; a layer that computes tokens
# separately, without and with weights; the two ends of a region of tensor parallelism, and an
# entire region; a block whose input and output are parts; any other layer.
Role: TypeAlias = Literal[
    "tokens", "table", "tokenwise", "norm", "columns", "rows", "region", "block", "other"
]
NORMS = ("LayerNormalization", "RMSNormalization")
# Layers that compute each channel separately, but mix tokens.
_MIXING = (
    "BatchNormalization", "SpatialDropout", "Pooling", "ZeroPadding", "Cropping", "UpSampling",
)  # fmt: skip
TOKENWISE = frozenset(kind for kind in CHANNELWISE if not any(mixing in kind for mixing in _MIXING))
# Roles whose outputs are parts, that pass parts on, and that need the full sequence repeatedly.
_SOURCES = ("tokens", "rows", "region", "block")
_PASSING = ("tokenwise", "norm", "block")
_REGIONS = ("columns", "region")


@attrs.frozen
class Roles:
    """The roles of a model's layers."""

    chosen: Mapping[str, Choice]  # how the variables are laid out, by path
    axis: str  # the axis of tensor parallelism

    def of(self, layer: LayerFacts) -> Role:
        """Classifies a layer by its class and by the sharding of its kernel."""
        if output := _attention_output(layer):
            return "region" if self._shards(output, 0) else "other"
        linear = as_linear(layer)
        if linear is not None:
            if self._shards(layer, linear.out_dim):
                return "columns"
            is_rows = self._shards(layer, linear.in_dim) and len(layer.input_shape or ()) == 3
            return "rows" if is_rows else "other"
        if layer.is_a("Embedding"):
            shape = layer.input_shape or ()
            return "tokens" if len(shape) == 2 and shape[0] != 1 else "table"
        if layer.is_a(*NORMS):
            return "norm" if _is_over_channels(layer) else "other"
        if layer.is_a(*TOKENWISE) and is_channelwise(layer):
            return "tokenwise"
        return self._role_of_container(layer)

    def ends(self, layer: LayerFacts) -> Iterator[LayerFacts]:
        """Yields the layers in it, or itself, whose outputs are its parts."""
        if output := _attention_output(layer):
            yield output
        elif self.of(layer) in ("rows", "tokens") and not layer.children:
            yield layer
        else:
            for child in layer.children:
                if self.of(child) in ("rows", "tokens", "region", "block"):
                    yield from self.ends(child)

    def entries(self, block: LayerFacts) -> Iterator[LayerFacts]:
        """Yields the norms of a block before its regions, which need the full sequence."""
        for child in block.children:
            if self.of(child) == "norm":
                yield child
            elif self.of(child) == "block":
                yield from self.entries(child)

    def _shards(self, layer: LayerFacts, dim: int) -> bool:
        kernel = layer.variable("kernel")
        return kernel is not None and self.chosen[kernel.path].spec[dim] == self.axis

    def _role_of_container(self, layer: LayerFacts) -> Role:
        """Classifies a layer with layers in it.

        Without a graph, as many norms as regions are taken for a block in which each region follows
        a norm. A wrong guess costs time only.
        """
        roles = [self.of(child) for child in layer.children if not child.is_a("InputLayer")]
        sums = roles.count("rows") + roles.count("region")
        inside = set(roles) - {"tokenwise"}
        if inside <= {"columns", "rows", "region"} and sums == 1:
            return "region"
        if layer.feeds is not None:
            return "other"
        if "tokens" in inside and inside <= {"tokens", "table", "norm"}:
            return "tokens"
        is_known = inside <= {"norm", "columns", "rows", "region", "block"}
        is_even = roles.count("norm") == sums and ("block" in inside or sums)
        return "block" if is_known and is_even else "other"


def _attention_output(layer: LayerFacts) -> LayerFacts | None:
    """Finds the last layer in an attention; None if `layer` is no attention, or does more."""
    attentions_in_layer = list(attentions(layer))
    return (
        attentions_in_layer[0].output
        if len(attentions_in_layer) == 1 and not attentions_in_layer[0].is_fused
        else None
    )


def _is_over_channels(norm: LayerFacts) -> bool:
    """Tells whether `norm` normalizes each token separately: over the last dim only."""
    axis = norm.config.get("axis", -1)
    axes = axis if isinstance(axis, list | tuple) else [axis]
    last = len(norm.input_shape or ()) - 1
    return len(axes) == 1 and axes[0] in (-1, last)


@attrs.frozen
class Flow:
    """The outputs of a functional model's layers: sharded, passed on, or all-gathered."""

    graph: Graph
    roles: Mapping[str, Role]  # the roles of its layers, by name

    @classmethod
    def of(cls, model: LayerFacts, roles: Roles) -> "Flow":
        """Builds the flow through `model`, which has a graph.

        A layer that gives the model's output needs the full sequence once.
        """
        child_roles = {child.name: roles.of(child) for child in model.children}
        heads: dict[str, Role] = {head.layer.name: "other" for head in graph_heads(model)}
        return cls(Graph.of(model), child_roles | heads)

    def sharded(self) -> list[str]:
        """Lists the layers whose outputs are computed in parts of the sequence.

        If the norm before a region also feeds a residual connection, the region would all-gather
        the parts for each of its products. The outputs that are added to them stay full then.
        """
        sources = {name for name, role in self.roles.items() if role in _SOURCES}
        while True:
            sharded = self._sharded_from(sources)
            costly = [name for name in sharded if self._is_costly(name)]
            if not costly:
                # If no layer computes with the parts, the sum is all-reduced instead.
                users = self.graph.users
                return [
                    name
                    for name in sharded
                    if any(map(self._passes_parts_on, [name, *users[name]]))
                ]
            sources -= self._combined_with(costly, sharded)

    def is_gathered(self, name: str) -> bool:
        """Tells whether the sharded output of `name` is all-gathered at once for its users."""
        users = self.graph.users[name]
        is_layer = bool(self.graph.nodes[name].output_path)
        return is_layer and bool(users) and not any(map(self._passes_parts_on, users))

    def _sharded_from(self, sources: set[str]) -> list[str]:
        """Lists the sources and the layers that pass parts on, in the order of the graph."""
        sharded: dict[str, None] = {}
        for name, role in self.roles.items():
            is_fed = not sharded.keys().isdisjoint(self.graph.producers[name])
            if name in sources or (role in ("tokenwise", "norm") and is_fed):
                sharded[name] = None
        return list(sharded)

    def _passes_parts_on(self, name: str) -> bool:
        return self.roles[name] in _PASSING

    def _is_costly(self, name: str) -> bool:
        users = [self.roles[user] for user in self.graph.users[name]]
        return not self.is_gathered(name) and not set(_REGIONS).isdisjoint(users)

    def _combined_with(self, names: Iterable[str], sharded: list[str]) -> set[str]:
        """Collects `names` and the layers that are combined with them without an all-gather."""
        together: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name in together or name not in sharded:
                continue
            together.add(name)
            todo += filter(self._passes_parts_on, self.graph.users[name])
            todo += self.graph.producers[name] if self._passes_parts_on(name) else []
        return together
