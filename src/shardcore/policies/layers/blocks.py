"""Pairs in a layer whose graph nobody knows: told by the order of definition, and by shapes."""

from itertools import takewhile

from shardcore.policies.layers.linear import Linear, as_linear, is_channelwise
from shardcore.policies.layers.regions import Found, Region
from shardcore.ports.model import LayerFacts

TOLD_BY = "order and shapes"


def block_regions(block: LayerFacts) -> Found:
    """The regions of a block; and the linear layers that are in none, with why.

    Linear layers of one shape (d, f) that are defined one after another are taken for the columns;
    batch normalizations of width f may follow; the next layer is taken for the rows if it is
    linear and of shape (f, ...). Where that might be wrong, nothing is taken.
    """
    layers = [child for child in block.children if _counts(child)]
    regions: list[Region] = []
    alone: list[tuple[Linear, str]] = []
    while layers:
        columns = _same_shape(layers)
        if not columns:
            layers = layers[1:]
            continue
        rest = layers[len(columns) :]
        norms = list(takewhile(lambda each: each.is_a("BatchNormalization"), rest))
        row = as_linear(rest[len(norms)]) if len(rest) > len(norms) else None
        why = _why_no_pair(columns, norms, row, block)
        if why is None and row is not None:
            regions.append(Region(tuple(columns), (row,), tuple(norms), TOLD_BY))
            layers = rest[len(norms) + 1 :]
        else:
            alone += [(each, f"no graph, and {why}") for each in columns]
            layers = rest
    return regions, alone


def _counts(layer: LayerFacts) -> bool:
    """Whether the layer has weights: a dropout has a seed only."""
    is_norm = layer.is_a("BatchNormalization")
    return bool(layer.all_variables()) and (is_norm or not is_channelwise(layer))


def _same_shape(layers: list[LayerFacts]) -> list[Linear]:
    """The linear layers at the beginning of `layers` that have one shape."""
    found: list[Linear] = []
    for layer in layers:
        linear = as_linear(layer)
        if linear is None or (found and linear.kernel.shape != found[0].kernel.shape):
            break
        found.append(linear)
    return found


def _why_no_pair(
    columns: list[Linear], norms: list[LayerFacts], row: Linear | None, block: LayerFacts
) -> str | None:
    width = columns[0].width_out
    if row is None:
        return "no linear layer follows it in its block"
    if row.width_in != width:
        return "the next linear layer of its block has another width"
    if columns[0].width_in == width:
        return "by its shape it may be a column or a row"
    if not all(each.is_elementwise for each in columns):
        return "its activation needs all its channels"
    all_norms = (each for each in block.children if each.kind.endswith("Normalization"))
    others = [each for each in all_norms if each not in norms]
    if any(v.shape == (width,) for each in others for v in each.variables):
        return "a norm of its width may stand behind it"
    if not all(is_channelwise(each) and _has_shape(each, width) for each in norms):
        return "the norm behind it is not of its channels"
    return None


def _has_shape(layer: LayerFacts, width: int) -> bool:
    return all(each.shape == (width,) for each in layer.variables)
