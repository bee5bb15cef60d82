"""Policy `tensor_parallel`: consecutive layers are split in pairs, with one reduction per pair.

A variable outside pairs, attentions and embeddings is replicated: its split would save memory, but
move activations. To split it, edit the plan.
"""

import attrs

from shardcore.domain.mesh import Mesh
from shardcore.policies.layers.linear import Linear, attention_choices, is_attention
from shardcore.policies.layers.regions import Region, block_regions, graph_regions
from shardcore.policies.splits import SMALL, all_replicated, model_axis, saves, split
from shardcore.ports.model import LayerFacts
from shardcore.ports.policy import Choice

Choices = dict[str, Choice]


def plan(model: LayerFacts, mesh: Mesh, *, axis: str | None = None, small: int = SMALL) -> Choices:
    """Splits column and row pairs, attention heads and embeddings over the model axis.

    Args:
        model: The model.
        mesh: The mesh.
        axis: The axis to split over, by default the last.
        small: A pair, an attention or an embedding of fewer bytes than this is replicated.
    """
    name = model_axis(mesh, axis)
    if mesh.axis_size(name) == 1:
        return all_replicated(model.all_variables(), f"axis {name!r} has one rank")
    splitter = _Splitter(mesh, name, small)
    chosen: Choices = {}
    for layer in model.layers():
        chosen = splitter.choices(layer) | chosen  # the choice of a parent has precedence
    return {each.path: chosen[each.path] for each in model.all_variables()}


@attrs.frozen
class _Splitter:
    """Chooses the layouts for a layer and the layers in it."""

    mesh: Mesh
    axis: str
    small: int

    def choices(self, layer: LayerFacts) -> Choices:
        is_norm = layer.kind.endswith("Normalization")
        why = "a norm sees all channels" if is_norm else f"{layer.kind} is not split"
        own = all_replicated(layer.variables, why)
        if is_attention(layer):
            size = sum(each.bytes for each in layer.all_variables())
            if size < self.small:
                return all_replicated(layer.all_variables(), self._is_small("the attention", size))
            return own | attention_choices(layer, self.axis, self.mesh.axis_size(self.axis))
        if layer.is_a("Embedding"):
            return own | self._embedding(layer)
        return own | self._pairs(layer)

    def _embedding(self, layer: LayerFacts) -> Choices:
        table = layer.variable("embeddings")
        if table is None or len(table.shape) != 2:
            return {}
        spec = split(table, 0, self.axis)
        if table.bytes < self.small:
            return all_replicated([table], self._is_small("the table", table.bytes))
        if not saves(table, spec, self.mesh):
            return all_replicated([table], "it has one row")
        reason = f"rows: a rank looks up its own {layer.name!r} rows, the sum is the output"
        return {table.path: Choice(spec, reason)}

    def _pairs(self, layer: LayerFacts) -> Choices:
        """Returns the choices for regions, those that save most first; a layer is in one region."""
        regions, alone = (block_regions if layer.feeds is None else graph_regions)(layer)
        chosen = _all_whole(alone)
        taken: set[str] = set()
        for region in sorted(regions, key=lambda each: -each.bytes):
            why = self._why_not(region, taken)
            if why is None:
                taken |= {each.path for each in region.members}
                chosen |= self._region(region)
            else:
                chosen = _all_whole([(each, why) for each in region.columns]) | chosen
        return chosen

    def _why_not(self, region: Region, taken: set[str]) -> str | None:
        if not taken.isdisjoint(each.path for each in region.members):
            return "a layer that it would pair with is in another pair"
        parts = self.mesh.axis_size(self.axis)
        if region.width % parts:
            return f"width {region.width} does not divide by {parts}"
        if region.bytes < self.small:
            return self._is_small("the pair", region.bytes)
        return None

    def _region(self, region: Region) -> Choices:
        chosen: Choices = {}
        columns = ", ".join(dict.fromkeys(each.layer.name for each in region.columns))
        rows = ", ".join(dict.fromkeys(each.layer.name for each in region.rows))
        for linear in region.columns:
            chosen |= linear.columns(self.axis, f"columns: {rows} sums up (by {region.found_by})")
        for linear in region.rows:
            chosen |= linear.rows(self.axis, f"rows: sums up {columns} (by {region.found_by})")
        for layer in region.between:
            for each in layer.variables:
                chosen[each.path] = Choice(split(each, 0, self.axis), f"as {columns}")
        return chosen

    def _is_small(self, what: str, size: int) -> str:
        return f"{what} has {size} bytes, fewer than small={self.small}"


def _all_whole(layers: list[tuple[Linear, str]]) -> Choices:
    found: Choices = {}
    for linear, why in layers:
        found |= all_replicated(linear.layer.variables, why)
    return found
