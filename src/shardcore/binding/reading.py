"""Seam: a tensor becomes a NumPy array. It is the whole value, on every rank."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from shardcore.binding.collective_errors import check_other_ranks
from shardcore.binding.session import Sessions
from shardcore.domain.layout import Layout


def whole(tensor: Any, sessions: Sessions) -> Any:
    """The whole value of `tensor`, gathered if it is sharded."""
    strategy = sessions.keeper(tensor) if isinstance(tensor, torch.Tensor) else None
    if strategy is None:
        return tensor
    check_other_ranks(lambda: _is_split(strategy.layout(tensor)), sessions)
    return strategy.whole(tensor)


def _is_split(layout: Layout | None) -> bool:
    return layout is not None and not layout.is_replicated


def to_numpy(original: Callable[[Any], Any], sessions: Sessions) -> Callable[[Any], Any]:
    """`convert_to_numpy`: sharded tensors, alone or in a list, are gathered first."""

    @wraps(original)
    def convert_to_numpy(x: Any) -> Any:
        value = getattr(x, "value", x)  # a Keras variable
        if isinstance(value, list | tuple):
            return original([whole(getattr(each, "value", each), sessions) for each in value])
        return original(whole(value, sessions))

    return convert_to_numpy
