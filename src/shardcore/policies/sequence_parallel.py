"""Policy `sequence_parallel`: `tensor_parallel`, and the sequence is sharded between its regions.

The sum of a region is reduce-scattered over the tokens instead of all-reduced. Norms and residual
connections compute each rank's tokens. The sequence is all-gathered once before the next region.
The bytes stay the same; activations between regions are sharded (Korthikanti et al. 2022, 4.2.2).
"""

from collections.abc import Iterator

import attrs

from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies import tensor_parallel
from shardcore.policies.specs import SMALL, batch_axis, check_batch_apart, model_axis
from shardcore.policies.tokens import Flow, Roles
from shardcore.ports.policy import Choice, LayerFacts


def plan(
    model: LayerFacts,
    mesh: Mesh,
    *,
    axis: str | None = None,
    batch: str | None = None,
    small: int = SMALL,
) -> dict[str, Choice]:
    """Lays out variables as `tensor_parallel` does, and the outputs at the borders of its regions.

    Args:
        model: The model.
        mesh: The mesh.
        axis: The axis that shards variables and sequences, by default the last.
        batch: The axis that shards the batch, by default the first.
        small: A pair, an attention or an embedding of fewer bytes than this is replicated.

    Raises:
        PolicyError: If one axis would shard both the batch and the sequence.
    """
    name, rows = model_axis(mesh, axis), batch_axis(mesh, batch)
    check_batch_apart("sequence_parallel", name, rows)
    chosen = tensor_parallel.plan(model, mesh, axis=name, small=small)
    if mesh.axis_size(name) == 1:
        return chosen
    return chosen | dict(_Edges(Roles(chosen, name), rows, name).choices(model))


@attrs.frozen
class _Edges:
    """Chooses the layouts of layer outputs."""

    roles: Roles
    batch: str
    axis: str

    def choices(self, layer: LayerFacts) -> Iterator[tuple[str, Choice]]:
        """Yields the choices for `layer` and the layers in it."""
        if layer.feeds is not None:
            yield from self._in_graph(layer)
        elif self.roles.of(layer) == "block":
            yield from self._block(layer)
            return
        else:
            yield from self._in_order(layer)
        for child in layer.children:
            if self.roles.of(child) == "other" and child.children:
                yield from self.choices(child)

    def _in_graph(self, model: LayerFacts) -> Iterator[tuple[str, Choice]]:
        flow = Flow.of(model, self.roles)
        for name in flow.sharded():
            layer, role = flow.graph.nodes[name], flow.roles[name]
            if role == "block":
                yield from self._block(layer)
            elif role in ("tokens", "rows", "region"):
                yield from map(self._sharded, self.roles.ends(layer))
            if flow.is_gathered(name):
                users = ", ".join(flow.graph.users[name])
                yield self._gathered(layer, users)

    def _in_order(self, layer: LayerFacts) -> Iterator[tuple[str, Choice]]:
        """Yields the choices for embeddings, blocks and later norms of a layer without a graph."""
        roles = {child.name: self.roles.of(child) for child in layer.children}
        if "block" not in roles.values():
            return
        for child in layer.children:
            if roles[child.name] == "block":
                yield from self._block(child)
            elif roles[child.name] == "tokens":
                yield from map(self._sharded, self.roles.ends(child))
            elif roles[child.name] == "norm":
                yield self._gathered(child, "what follows")

    def _block(self, block: LayerFacts) -> Iterator[tuple[str, Choice]]:
        yield from map(self._sharded, self.roles.ends(block))
        for norm in self.roles.entries(block):
            yield self._gathered(norm, "what follows")

    def _sharded(self, layer: LayerFacts) -> tuple[str, Choice]:
        reason = "parts of the sequence: " + (
            "a rank looks up all tokens and keeps its own"
            if layer.is_a("Embedding")
            else "a rank keeps the sums of its tokens"
        )
        return layer.output_path, Choice((self.batch, self.axis, None), reason)

    def _gathered(self, layer: LayerFacts, users: str) -> tuple[str, Choice]:
        spec = (self.batch, None, None)
        return layer.output_path, Choice(spec, f"gathered once, for {users}")
