"""Policy `context_parallel`: every rank computes its part of each sequence.

Inputs and norms name the sharding, and all layers between them keep it: a layer that computes
tokens separately needs nothing else, and attention passes keys and values on around a ring
(`domain.engine.ring`). Each rank holds all variables, or parts of them: over `shard` as
with `fully_sharded`, or over `tensor` as with `tensor_parallel`, where a ring has some heads.
"""

from collections.abc import Iterator

import attrs

from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies import tensor_parallel
from shardcore.policies.data_parallel import plan_fully_sharded
from shardcore.policies.specs import (
    SMALL,
    all_replicated,
    batch_axis,
    check_batch_apart,
    model_axis,
)
from shardcore.policies.tokens import Roles
from shardcore.ports.policy import Choice, LayerFacts


def plan(
    model: LayerFacts,
    mesh: Mesh,
    *,
    axis: str | None = None,
    batch: str | None = None,
    shard: str | None = None,
    tensor: str | None = None,
    small: int = SMALL,
) -> dict[str, Choice]:
    """Shards sequences over an axis: inputs, the outputs of embeddings and of norms.

    Args:
        model: The model.
        mesh: The mesh.
        axis: The axis that shards sequences, by default the last but `tensor`.
        batch: The axis that shards the batch, by default the first.
        shard: The axis that shards large variables, as `fully_sharded` does; by default none.
        tensor: The axis that shards pairs and heads, as `tensor_parallel` does; by default none.
        small: A variable is sharded over `shard` if that saves every rank this many bytes; a part
            of the model over `tensor` if it has as many.

    Raises:
        PolicyError: If one axis would shard two of batch, sequence and heads, both `shard` and
            `tensor` are given, or the model has no sequence.
    """
    if axis is None and tensor is not None:
        axis = next((other for other in reversed(mesh.axis_names) if other != tensor), None)
    name = model_axis(mesh, axis, "context_parallel", "seq")
    rows = batch_axis(mesh, batch)
    check_batch_apart("context_parallel", name, rows)
    if tensor is not None:
        _check_tensor(tensor, shard, (rows, name))
        chosen = tensor_parallel.plan(model, mesh, axis=tensor, small=small)
    elif shard is not None:
        chosen = plan_fully_sharded(model, mesh, axis=shard, small=small)
    else:
        reason = f"gradients are summed over {rows!r} and {name!r}"
        chosen = all_replicated(model.all_variables(), reason)
    if mesh.axis_size(name) == 1:
        return chosen
    outputs = dict(_Sequences(Roles(chosen, name), rows, name).choices(model))
    if not outputs:
        raise PolicyError(
            "Policy 'context_parallel' finds no sequence in the model: no input of three dims, no "
            "embedding of tokens and no norm of (batch, tokens, channels). Take another policy."
        )
    return chosen | outputs


def _check_tensor(tensor: str, shard: str | None, others: tuple[str, ...]) -> None:
    if tensor in others or shard is not None:
        raise PolicyError(
            f"Policy 'context_parallel' got tensor={tensor!r} and shard={shard!r} beside the axes "
            f"{list(others)} of the batch and the sequence: give `tensor` an axis that shards none "
            "of them, and leave `shard` out.",
            name="tensor",
            got=repr(tensor),
        )


@attrs.frozen
class _Sequences:
    """Chooses the layouts of layer outputs."""

    roles: Roles
    batch: str
    axis: str

    def choices(self, model: LayerFacts) -> Iterator[tuple[str, Choice]]:
        """Yields the choices for the outputs where sequences begin, and of norms."""
        layers = [layer for layer in model.layers() if layer.output_path and not layer.children]
        tokens = {layer.input_shape for layer in layers if self.roles.of(layer) == "tokens"}
        for layer in layers:
            shape, role = layer.input_shape or (), self.roles.of(layer)
            if layer.is_a("InputLayer"):
                if len(shape) == 3 or shape in tokens:
                    yield self._sharded(layer, len(shape), "a rank takes its tokens of the input")
            elif role == "tokens":
                yield self._sharded(layer, 3, "a rank looks up its tokens")
            elif role == "norm" and len(shape) == 3:
                yield self._sharded(layer, 3, "a rank normalizes its tokens")

    def _sharded(self, layer: LayerFacts, ndim: int, why: str) -> tuple[str, Choice]:
        spec = (self.batch, self.axis, *[None] * (ndim - 2))
        return layer.output_path, Choice(spec, f"parts of the sequence: {why}")
