"""Groups of layers that are laid out together: equal blocks in a row, and layers of one region."""

from collections import Counter
from collections.abc import Iterator

from shardcore.policies.layers.regions import graph_regions
from shardcore.ports.model import LayerFacts


def layer_groups(model: LayerFacts) -> tuple[tuple[str, ...], ...]:
    """Returns the paths of the layers of each group, in order; a layer may be a group alone.

    A layer in which Keras knows no graph, such as a block, is one of these with all that it holds.
    Layers without variables, and those that share their names with others, are in no group.

    Example:
        >>> from shardcore.ports.model import VariableFacts
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
