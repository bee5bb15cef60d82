"""Policy `data_parallel`: every rank holds every variable, and computes on its own rows."""

from shardcore.domain.mesh import Mesh
from shardcore.policies.splits import batch_axis, whole
from shardcore.ports.model import LayerFacts
from shardcore.ports.policy import Choice


def plan(model: LayerFacts, mesh: Mesh, *, axis: str | None = None) -> dict[str, Choice]:
    """Everything whole.

    Args:
        model: The model.
        mesh: The mesh.
        axis: The axis that splits the batch, by default the first.
    """
    reason = f"whole: gradients are summed over {batch_axis(mesh, axis)!r}"
    return {
        each.path: Choice(whole(each), reason if each.trainable else "whole: not trained")
        for each in model.all_variables()
    }
