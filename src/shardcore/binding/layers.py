"""Seams: layers. Their call, the layouts of their outputs, and the states of recurrences."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import attrs
import torch

from shardcore.binding import seams
from shardcore.binding.session import Session, Sessions
from shardcore.domain.layout import Layout
from shardcore.ports.whereabouts import inside


def layer_call(original: Callable[..., Any], sessions: Sessions) -> Callable[..., Any]:
    """`Layer.__call__`: in it plain tensors mix with sharded ones, on every thread.

    Keras keeps the distribution by thread: one without it visits the strategy.
    """

    @wraps(original)
    def __call__(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not sessions.are_open():
            return original(layer, *args, **kwargs)
        strategy = sessions.visited()
        visit = nullcontext() if strategy is None else strategy.scope(visiting=True)
        with visit, inside(layer.path or layer.name):
            return original(layer, *args, **kwargs)

    return __call__


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


def initial_states(original: Callable[..., Any], sessions: Sessions) -> Callable[..., Any]:
    """`get_initial_state`: plain states are split over the batch axis, as the sequences are.

    A whole one, times a recurrent kernel that is split, would be split as the kernel is: that
    product would be moved, beside the kernel.
    """

    @wraps(original)
    def get_initial_state(layer: Any, batch_size: Any) -> Any:
        states = original(layer, batch_size)
        session = sessions.current()
        # A stateful layer makes variables of them.
        if session is None or seams.is_symbolic() or layer.stateful:
            return states
        return seams.map_tensors(lambda state: _split(state, session), states)

    return get_initial_state


def _split(state: torch.Tensor, session: Session) -> Any:
    """The rows of a state that are this rank's; all of them where there are fewer than ranks."""
    ranks = session.mesh.axis_size(session.batch_axis)
    if session.strategy.owns(state) or state.requires_grad or not 1 < ranks <= len(state):
        return state
    return session.strategy.activation(state, session.batch_layout(state.ndim))
