"""Attentions: the projections into heads are sharded by heads, the output by the same heads."""

from collections.abc import Iterator

import attrs

from shardcore.policies.linear import Linear, as_einsum, as_linear
from shardcore.policies.specs import all_replicated
from shardcore.ports.policy import Choice, LayerFacts, VariableFacts

# The names of the projections into heads, and of the one out of them: those of Keras and of most
# models of KerasHub, of its T5, and of its MMDiT, which has one kernel for query, key and value.
_NAMES = (
    (("query", "key", "value"), "attention_output"),
    (("query_projector", "key_projector", "value_projector"), "output_projector"),
    (("attention_qkv",), "attention_proj"),
    (("attention_qkv2",), "attention_proj2"),
)


@attrs.frozen
class Attention:
    """The projections of an attention."""

    inputs: tuple[LayerFacts, ...]
    output: LayerFacts
    heads: int | None  # the number that the layer knows, for kernels whose shapes do not show it

    @property
    def is_fused(self) -> bool:
        """Whether one kernel makes query, key and value."""
        return len(self.inputs) == 1

    @property
    def bytes(self) -> int:
        """The bytes of its variables."""
        return sum(variable.bytes for variable in self._variables)

    def replicated(self, why: str) -> dict[str, Choice]:
        """Replicates all its variables."""
        return all_replicated(self._variables, why)

    def choices(self, axis: str, parts: int) -> dict[str, Choice]:
        """Shards by heads; replicates the heads if the axis does not divide them.

        Key and value heads that do not divide (grouped queries) are replicated alone: every rank
        computes all of them, and its query heads.
        """
        output, heads = self._out_of_heads()
        query = self._into_heads(self.inputs[0], output, heads)
        if output is None or query is None or query[1] != heads * (3 if self.is_fused else 1):
            return self.replicated("its kernels do not show its heads")
        if heads % parts:
            return self.replicated(f"{heads} heads do not divide by {parts}")
        choices = output.rows(axis, f"rows: sums up {heads} heads over {axis!r}")
        for layer in self.inputs:
            choices |= self._input_choices(
                layer, self._into_heads(layer, output, heads), axis, parts
            )
        return choices

    @property
    def _variables(self) -> list[VariableFacts]:
        layers = (*self.inputs, self.output)
        return [variable for layer in layers for variable in layer.all_variables()]

    def _input_choices(
        self, layer: LayerFacts, projection: tuple[Linear, int] | None, axis: str, parts: int
    ) -> dict[str, Choice]:
        if projection is None:
            return all_replicated(layer.all_variables(), "its kernel does not show its heads")
        linear, heads = projection
        if heads % parts:
            why = f"{heads} {layer.name} heads do not divide by {parts}"
            return all_replicated(layer.variables, why)
        if self.is_fused:
            return linear.columns(axis, "columns: query, key and value, exchanged into heads")
        return linear.columns(axis, f"columns: {heads} {layer.name} heads")

    def _out_of_heads(self) -> tuple[Linear | None, int]:
        """Finds the projection out of the heads, and how many it sums up."""
        if output := as_einsum(self.output, summed=2, new=1):
            return output, output.width_in
        output = as_linear(self.output)
        if output is None or not self.heads or output.width_in % self.heads:
            return None, 0
        return output, self.heads

    def _into_heads(
        self, layer: LayerFacts, output: Linear | None, heads: int
    ) -> tuple[Linear, int] | None:
        """Finds a projection into heads of the size of those of `output`, and their number."""
        if linear := as_einsum(layer, summed=1, new=2):
            return linear, linear.width_out
        linear = as_linear(layer)
        if linear is None or output is None:
            return None
        count, rest = divmod(linear.width_out * heads, output.width_in)
        return None if rest else (linear, count)


def attentions(layer: LayerFacts) -> Iterator[Attention]:
    """Yields the attentions whose projections `layer` has."""
    for names, last in _NAMES:
        inputs = tuple(projection for name in names if (projection := layer.child(name)))
        output = layer.child(last)
        if len(inputs) == len(names) and output is not None:
            yield Attention(inputs, output, layer.config.get("num_heads"))
