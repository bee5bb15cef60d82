"""Seam: the states that a recurrence begins with, zeros as a rule."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from shardcore.binding import seams
from shardcore.binding.session import Session, Sessions


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
