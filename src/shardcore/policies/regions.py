"""Regions of linear layers that are sharded together, by columns and then by rows.

The layers between them compute each channel separately, so every rank computes its own channels.
The partial sums are reduced once, at the end (Megatron's pair).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import takewhile

import attrs

from shardcore.domain.errors import ControlFlow
from shardcore.policies.linear import Linear, as_linear, is_channelwise
from shardcore.ports.policy import LayerFacts


@attrs.frozen
class Region:
    """Layers that can be sharded together."""

    columns: tuple[Linear, ...]  # the linear layers whose output has the sharded width
    rows: tuple[Linear, ...]  # the linear layers that contract it
    # Layers with variables of that width, such as a batch normalization.
    between: tuple[LayerFacts, ...] = ()
    found_by: str = "graph"  # the method that found it, for the reason of the choice

    @property
    def width(self) -> int:
        """The width that is sharded."""
        return self.columns[0].width_out

    @property
    def members(self) -> tuple[Linear, ...]:
        """The linear layers."""
        return (*self.columns, *self.rows)

    @property
    def bytes(self) -> int:
        """The bytes of their kernels."""
        return sum(member.kernel.bytes for member in self.members)


class NoRegion(ControlFlow):
    """The output of a layer cannot be sharded. The message says why; internal to this package."""


@attrs.frozen
class Graph:
    """The operations of a functional model by their names, with their inputs and users."""

    nodes: dict[str, LayerFacts]
    producers: dict[str, list[str]]
    users: dict[str, list[str]]
    outputs: frozenset[str]

    @classmethod
    def of(cls, model: LayerFacts) -> "Graph":
        """Builds the graph of a model whose `feeds` are known."""
        producers, users = defaultdict(list), defaultdict(list)
        for producer, user in model.feeds or ():
            producers[user].append(producer)
            users[producer].append(user)
        nodes = {node.name: node for node in model.children}
        return cls(nodes, producers, users, frozenset(model.outputs))

    def region(self, start: str) -> Region:
        """Collects the layers that are sharded together with the output of layer `start`.

        Raises:
            NoRegion: If a layer needs that output in full.
        """
        sharded: dict[str, None] = {}
        rows: dict[str, None] = {}
        todo = [start]
        while todo:
            name = todo.pop()
            if name in sharded:
                continue
            sharded[name] = None
            todo += self._sharded_with(name)
            for user in self.users[name]:
                if is_channelwise(self.nodes[user]):
                    todo.append(user)
                else:
                    rows[user] = None
        return self._checked_region(sharded, rows)

    def _sharded_with(self, name: str) -> list[str]:
        """Lists the layers whose outputs must be sharded with the output of `name`."""
        node = self.nodes[name]
        if name in self.outputs:
            raise NoRegion("its output is one of the model's")
        linear = as_linear(node)
        if linear is None and not is_channelwise(node):
            raise NoRegion(f"{name!r} ({node.kind}) meets its output")
        if linear is not None and not linear.is_elementwise:
            raise NoRegion(f"{node.config.get('activation')} needs all its channels")
        return self.producers[name] if linear is None else []

    def _checked_region(self, sharded: dict[str, None], rows: dict[str, None]) -> Region:
        for name in rows:
            if as_linear(self.nodes[name]) is None:
                raise NoRegion(f"{name!r} ({self.nodes[name].kind}) needs its full output")
            if not sharded.keys() >= set(self.producers[name]):
                raise NoRegion(f"{name!r}, which follows, is called on other inputs too")
        if not rows:
            raise NoRegion("nothing follows it")
        if not sharded.keys().isdisjoint(rows):
            raise NoRegion("its output comes back to it")
        columns = _linears(self.nodes[name] for name in sharded)
        summing = _linears(self.nodes[name] for name in rows)
        widths = {linear.width_out for linear in columns} | {linear.width_in for linear in summing}
        if len(widths) > 1:
            raise NoRegion(f"it meets other widths: {', '.join(map(str, sorted(widths)))}")
        # Channelwise layers with a value per channel.
        norms = (n for name in sharded if (n := self.nodes[name]).is_a("BatchNormalization"))
        return Region(columns, summing, tuple(norms))


def _linears(layers: Iterable[LayerFacts]) -> tuple[Linear, ...]:
    return tuple(linear for layer in layers if (linear := as_linear(layer)) is not None)


Regions = tuple[list[Region], list[tuple[Linear, str]]]


def graph_regions(model: LayerFacts) -> Regions:
    """Finds the regions of a model with a graph, and the other linear layers with a reason."""
    graph = Graph.of(model)
    regions: dict[frozenset[str], Region] = {}
    alone: list[tuple[Linear, str]] = []
    for node in model.children:
        linear = as_linear(node)
        if linear is None:
            continue
        try:
            region = graph.region(node.name)
        except NoRegion as why:
            alone.append((linear, str(why)))
        else:
            regions[frozenset(linear.path for linear in region.columns)] = region
    return list(regions.values()), alone


def graph_heads(model: LayerFacts) -> tuple[Linear, ...]:
    """Finds the linear layers that give outputs of a model with a graph, and make them wider.

    A narrow output, such as a regression's, is cheap: its sharding would move a gradient for
    nothing.
    """
    if model.feeds is None:
        return ()
    graph = Graph.of(model)
    last = _linears(graph.nodes[name] for name in model.outputs if not graph.users[name])
    return tuple(
        linear for linear in last if linear.is_elementwise and linear.width_out > linear.width_in
    )


def block_regions(block: LayerFacts) -> Regions:
    """Guesses the regions of a block without a graph; the other linear layers have a reason.

    Consecutive linear layers of one shape (d, f) are the columns. Batch normalizations of width f
    may follow. The next layer is the rows if it is linear and of shape (f, ...). If this guess
    might be wrong, there is no region.
    """
    layers = [child for child in block.children if _has_weights(child)]
    regions: list[Region] = []
    alone: list[tuple[Linear, str]] = []
    while layers:
        columns = _same_shape(layers)
        if not columns:
            layers = layers[1:]
            continue
        rest = layers[len(columns) :]
        norms = list(takewhile(lambda layer: layer.is_a("BatchNormalization"), rest))
        row = as_linear(rest[len(norms)]) if len(rest) > len(norms) else None
        why = _reason_against_pair(columns, norms, row, block)
        if why is None and row is not None:
            regions.append(Region(tuple(columns), (row,), tuple(norms), "order and shapes"))
            layers = rest[len(norms) + 1 :]
        else:
            alone += [(linear, f"no graph, and {why}") for linear in columns]
            layers = rest
    return regions, alone


def _has_weights(layer: LayerFacts) -> bool:
    """Tells whether the layer has weights: a dropout only has a seed."""
    is_norm = layer.is_a("BatchNormalization")
    return bool(layer.all_variables()) and (is_norm or not is_channelwise(layer))


def _same_shape(layers: list[LayerFacts]) -> list[Linear]:
    """Takes the first linear layers of `layers`, as far as they have one shape."""
    linears: list[Linear] = []
    for layer in layers:
        linear = as_linear(layer)
        if linear is None or (linears and linear.kernel.shape != linears[0].kernel.shape):
            break
        linears.append(linear)
    return linears


def _reason_against_pair(
    columns: list[Linear], norms: list[LayerFacts], row: Linear | None, block: LayerFacts
) -> str | None:
    width = columns[0].width_out
    if row is None:
        return "no linear layer follows it in its block"
    if row.width_in != width:
        return "the next linear layer of its block has another width"
    if columns[0].width_in == width:
        return "by its shape it may be a column or a row"
    if not all(linear.is_elementwise for linear in columns):
        return "its activation needs all its channels"
    all_norms = (child for child in block.children if child.kind.endswith("Normalization"))
    others = [norm for norm in all_norms if norm not in norms]
    if any(v.shape == (width,) for other in others for v in other.variables):
        return "a norm of its width may stand behind it"
    shapes = {variable.shape for norm in norms for variable in norm.variables}
    if not shapes <= {(width,)} or not all(map(is_channelwise, norms)):
        return "the norm behind it is not of its channels"
    return None


def layer_groups(model: LayerFacts) -> tuple[tuple[str, ...], ...]:
    """Groups the paths of layers that are laid out together, in order.

    A layer in which Keras knows no graph, such as a block, is one of these with all that it holds.
    Layers without variables, and those that share their names with others, are in no group.

    Example:
        >>> from shardcore.ports.policy import VariableFacts
        >>> def layer(name):
        ...     kernel = VariableFacts(f"{name}/kernel", (4, 4))
        ...     return LayerFacts(name, ("Block",), variables=(kernel,), path=name)
        >>> children = tuple(map(layer, ("in", "block_0", "block_1", "out")))
        >>> runs = (("block_0", "block_1"),)
        >>> layer_groups(LayerFacts("model", ("Model",), children=children, feeds=(), runs=runs))
        (('in',), ('block_0', 'block_1'), ('out',))
    """
    names = Counter(layer.name for layer in model.layers())
    groups = (
        tuple(layer.path for layer in group if names[layer.name] == 1 and layer.all_variables())
        for group in _groups(model)
    )
    return tuple(group for group in groups if group)


def _groups(layer: LayerFacts) -> Iterator[list[LayerFacts]]:
    """Yields the groups of the children of `layer`, in the order of their first layers."""
    group_of = {child.name: child.name for child in layer.children}
    for names in _names_together(layer):
        first, *others = dict.fromkeys(group_of[name] for name in names)
        group_of = {n: first if group in others else group for n, group in group_of.items()}
    sizes = Counter(group_of.values())
    for name in dict.fromkeys(group_of.values()):
        group = [child for child in layer.children if group_of[child.name] == name]
        if sizes[name] == 1 and group[0].feeds is not None and group[0].children:
            yield from _groups(group[0])
        else:
            yield group


def _names_together(layer: LayerFacts) -> Iterator[tuple[str, ...]]:
    """Yields the names of children that are laid out together."""
    yield from layer.runs
    if layer.feeds is not None:
        regions, _ = graph_regions(layer)
        for region in regions:
            members = (*(member.layer for member in region.members), *region.between)
            yield tuple(member.name for member in members)
