"""Policy `data_parallel`: every rank holds every variable, and computes on its own rows."""

from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies.specs import all_replicated, batch_axis
from shardcore.ports.model import LayerFacts
from shardcore.ports.policy import Choice


def plan(model: LayerFacts, mesh: Mesh, *, axis: str | None = None) -> dict[str, Choice]:
    """Replicates every variable.

    Args:
        model: The model.
        mesh: The mesh.
        axis: The axis that shards the batch, by default the first.
    """
    reason = f"gradients are summed over {batch_axis(mesh, axis)!r}"
    variables = model.all_variables()
    not_trained = all_replicated(
        (variable for variable in variables if not variable.trainable), "not trained"
    )
    return all_replicated(variables, reason) | not_trained
