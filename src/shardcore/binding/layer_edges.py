"""Seam: the output of a layer. `Layer.__call__` asks for its layout and relays it."""

from typing import Any

import attrs

from shardcore.binding import seams
from shardcore.binding.session import Session, Sessions
from shardcore.domain.layout import Layout


@attrs.frozen
class LayerEdges:
    """What stands in for the module `distribution_lib` inside `keras.src.layers.layer`.

    Every output passes here: one that a rule names is relaid; in all others pending sums are
    reduced, so that no later operator reduces them again.
    """

    sessions: Sessions

    def distribution(self) -> "Edge | None":
        """The edge of the layer that is being called, None where nothing is distributed."""
        session = self.sessions.current()
        return None if session is None or seams.is_symbolic() else Edge(session)

    def distribute_tensor(self, outputs: Any, edge: "Output") -> Any:
        """The outputs of a layer, each in its layout."""
        return seams.map_tensors(edge.relay, outputs)


@attrs.frozen
class Edge:
    """Stands in for the distribution: gives the layout of every output."""

    session: Session

    def get_tensor_layout(self, path: str) -> "Output":
        """The output of the layer at `path`, which ends in "/output"."""
        self.session.output_paths.add(path)
        return Output(self.session, path, self.session.distribution.get_tensor_layout(path))


@attrs.frozen
class Output:
    """The output of one layer and the layout that a rule gives it, if any."""

    session: Session
    path: str
    tensor_layout: Any

    def relay(self, tensor: Any) -> Any:
        """One tensor of the output, in its layout.

        Raises:
            LayoutError: If the rule does not fit the tensor.
        """
        layout: Layout | None = None
        if self.tensor_layout is not None:
            layout = self.tensor_layout.backend_layout
            layout.fitting(tensor.shape, f"The output {self.path!r}")
        relaid = self.session.strategy.activation(tensor, layout)
        if relaid is not tensor:
            seams.copy_mask(tensor, relaid)
        return relaid
