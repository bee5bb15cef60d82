"""Policy `tensor_parallel`: consecutive layers are sharded in pairs, with one reduction per pair.

A variable outside pairs, attentions, experts, embeddings and heads is replicated: to shard it would
save memory, but move activations. To do so, edit the plan.
"""

import attrs

from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies.attention import attentions
from shardcore.policies.linear import Bank, Linear, bank_of
from shardcore.policies.regions import Region, block_regions, graph_heads, graph_regions
from shardcore.policies.specs import SMALL, all_replicated, model_axis, saves, sharded
from shardcore.ports.policy import Choice, LayerFacts, VariableFacts

Choices = dict[str, Choice]


def plan(model: LayerFacts, mesh: Mesh, *, axis: str | None = None, small: int = SMALL) -> Choices:
    """Shards pairs, attention heads, experts, embeddings and output layers over the model axis.

    Args:
        model: The model.
        mesh: The mesh.
        axis: The axis to shard over, by default the last.
        small: A part of fewer bytes than this is replicated.
    """
    name = model_axis(mesh, axis)
    if mesh.axis_size(name) == 1:
        return all_replicated(model.all_variables(), f"axis {name!r} has one rank")
    sharder = _Sharder(mesh, name, small)
    chosen: Choices = {}
    for layer in model.layers():
        chosen = sharder.choices(layer) | chosen  # the choice of a parent has precedence
    chosen |= sharder.heads(model, chosen)
    return {variable.path: chosen[variable.path] for variable in model.all_variables()}


@attrs.frozen
class _Sharder:
    """Chooses the layouts for a layer and the layers in it."""

    mesh: Mesh
    axis: str
    small: int

    @property
    def parts(self) -> int:
        """The number of parts."""
        return self.mesh.axis_size(self.axis)

    def choices(self, layer: LayerFacts) -> Choices:
        is_norm = layer.kind.endswith("Normalization")
        why = "a norm sees all channels" if is_norm else f"{layer.kind} is not sharded"
        own = all_replicated(layer.variables, why)
        if layer_attentions := list(attentions(layer)):
            for attention in layer_attentions:
                own |= (
                    attention.replicated(self._is_small("the attention", attention.bytes))
                    if attention.bytes < self.small
                    else attention.choices(self.axis, self.parts)
                )
            return own
        if bank := bank_of(layer):
            own |= self._experts(bank)
        if layer.is_a("Embedding"):
            return own | self._embedding(layer)
        return own | self._pairs(layer)

    def heads(self, model: LayerFacts, chosen: Choices) -> Choices:
        """Shards the layers that give the outputs of `model`, and are no rows."""
        choices: Choices = {}
        for linear in graph_heads(model):
            if any(chosen[linear.path].spec):
                continue
            if linear.kernel.bytes < self.small:
                size = linear.kernel.bytes
                choices |= _replicated([(linear, self._is_small("the output layer", size))])
            else:
                choices |= linear.columns(self.axis, "columns: a rank computes its own outputs")
        return choices

    def _experts(self, bank: Bank) -> Choices:
        if bank.bytes < self.small:
            return all_replicated(bank.variables, self._is_small("the bank", bank.bytes))
        if bank.experts % self.parts:
            why = f"{bank.experts} experts do not divide by {self.parts}"
            return all_replicated(bank.variables, why)
        reason = "experts: a rank computes its own, the sum over all is reduced"
        return {
            variable.path: Choice(sharded(variable, 0, self.axis), reason)
            for variable in bank.variables
        }

    def _embedding(self, layer: LayerFacts) -> Choices:
        """Shards the table, and its untied reverse, which makes logits."""
        name = layer.name
        why = f"rows: a rank looks up its own {name!r} rows, the sum is the output"
        chosen = self._table(layer.variable("embeddings"), 0, why)
        why = "columns: a rank computes the logits of these rows"
        return chosen | self._table(layer.variable("reverse_embeddings"), 1, why)

    def _table(self, table: VariableFacts | None, dim: int, reason: str) -> Choices:
        if table is None or len(table.shape) != 2:
            return {}
        spec = sharded(table, dim, self.axis)
        if table.bytes < self.small:
            return all_replicated([table], self._is_small("the table", table.bytes))
        if not saves(table, spec, self.mesh):
            return all_replicated([table], "it has one row")
        return {table.path: Choice(spec, reason)}

    def _pairs(self, layer: LayerFacts) -> Choices:
        """Shards regions, those that save most first; they share no layer."""
        regions, alone = (block_regions if layer.feeds is None else graph_regions)(layer)
        chosen = _replicated(alone)
        taken: set[str] = set()
        for region in sorted(regions, key=lambda region: -region.bytes):
            why = self._reason_against(region, taken)
            if why is None:
                taken |= {member.path for member in region.members}
                chosen |= self._region(region)
            else:
                chosen = _replicated([(linear, why) for linear in region.columns]) | chosen
        return chosen

    def _reason_against(self, region: Region, taken: set[str]) -> str | None:
        if not taken.isdisjoint(member.path for member in region.members):
            return "a layer that it would pair with is in another pair"
        if region.width % self.parts:
            return f"width {region.width} does not divide by {self.parts}"
        if region.bytes < self.small:
            return self._is_small("the pair", region.bytes)
        return None

    def _region(self, region: Region) -> Choices:
        chosen: Choices = {}
        columns = ", ".join(dict.fromkeys(linear.layer.name for linear in region.columns))
        rows = ", ".join(dict.fromkeys(linear.layer.name for linear in region.rows))
        for linear in region.columns:
            chosen |= linear.columns(self.axis, f"columns: {rows} sums up (by {region.found_by})")
        for linear in region.rows:
            chosen |= linear.rows(self.axis, f"rows: sums up {columns} (by {region.found_by})")
        for layer in region.between:
            for variable in layer.variables:
                chosen[variable.path] = Choice(sharded(variable, 0, self.axis), f"as {columns}")
        return chosen

    def _is_small(self, what: str, size: int) -> str:
        return f"{what} has {size} bytes, fewer than small={self.small}"


def _replicated(layers: list[tuple[Linear, str]]) -> Choices:
    choices: Choices = {}
    for linear, why in layers:
        choices |= all_replicated(linear.layer.variables, why)
    return choices
