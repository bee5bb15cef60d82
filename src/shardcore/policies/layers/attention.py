"""Attention: query, key and value are split by heads, the output by the same heads."""

import attrs

from shardcore.policies.layers.linear import einsum_dims
from shardcore.policies.sizes import all_whole, split
from shardcore.ports.model import LayerFacts, VariableFacts
from shardcore.ports.policy import Choice

INPUTS = ("query", "key", "value")
OUTPUT = "attention_output"


@attrs.frozen
class Projection:
    """A projection to or from heads.

    Args:
        layer: The layer.
        kernel: Its kernel.
        dim: The kernel's dim that counts the heads.
        bias_dim: The dim of the bias that does, None if it has none or no bias.
    """

    layer: LayerFacts
    kernel: VariableFacts
    dim: int
    bias_dim: int | None

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.kernel.shape[self.dim]

    @property
    def biases(self) -> tuple[VariableFacts, ...]:
        """Its bias, where that has no heads."""
        bias = self.layer.variable("bias")
        return () if bias is None or self.bias_dim is not None else (bias,)

    def choices(self, axis: str, reason: str) -> dict[str, Choice]:
        """Its variables split by heads."""
        found = {self.kernel.path: Choice(split(self.kernel, self.dim, axis), reason)}
        bias = self.layer.variable("bias")
        if bias is not None and self.bias_dim is not None:
            found[bias.path] = Choice(split(bias, self.bias_dim, axis), reason)
        return found


def is_attention(layer: LayerFacts) -> bool:
    """Whether `layer` holds projections by the names that Keras and KerasHub give them."""
    return all(layer.child(name) is not None for name in (*INPUTS, OUTPUT))


def attention_choices(layer: LayerFacts, axis: str, parts: int) -> dict[str, Choice]:
    """The split by heads. A head is never cut: where they do not divide, they stay whole.

    Key and value heads that do not divide (grouped queries) stay whole alone: every rank computes
    all of them, and the query heads that it holds.
    """
    output = _projection(layer.child(OUTPUT), is_input=False)
    inputs = {
        child.name: _projection(child, is_input=True)
        for child in layer.children
        if child.is_a("EinsumDense") and child.name != OUTPUT
    }
    query = inputs.get("query")
    if output is None or query is None or query.heads != output.heads:
        return all_whole(layer.all_variables(), "its heads are not told by its kernels")
    if query.heads % parts:
        return all_whole(layer.all_variables(), f"{query.heads} heads do not divide by {parts}")
    found = output.choices(axis, f"rows: sums up {query.heads} heads over {axis!r}")
    found |= all_whole(output.biases, "added to the sum")
    for name, projection in inputs.items():
        found |= _input_choices(name, projection, axis, parts)
    return found


def _input_choices(
    name: str, projection: Projection | None, axis: str, parts: int
) -> dict[str, Choice]:
    if projection is None:
        return {}
    if projection.heads % parts:
        why = f"{projection.heads} {name} heads do not divide by {parts}"
        return all_whole(projection.layer.variables, why)
    return projection.choices(axis, f"columns: {projection.heads} {name} heads")


def _projection(layer: LayerFacts | None, is_input: bool) -> Projection | None:
    """The projection, whose heads are the first of the two new, or summed, dims."""
    if layer is None:
        return None
    kernel, dims = layer.variable("kernel"), einsum_dims(layer)
    if kernel is None or dims is None or len(kernel.shape) != 3:
        return None
    summed, new = dims
    heads = new if is_input else summed
    if len(heads) != 2:
        return None
    bias = layer.variable("bias")
    has_heads = is_input and bias is not None and len(bias.shape) == 2
    return Projection(layer, kernel, heads[0], 0 if has_heads else None)
