"""Seam: the call of a layer. In it plain tensors mix with sharded ones, on whatever thread."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

from shardcore.binding.session import Sessions
from shardcore.ports.whereabouts import inside


def layer_call(original: Callable[..., Any], sessions: Sessions) -> Callable[..., Any]:
    """`Layer.__call__`: a thread without a distribution, which Keras keeps by thread, visits."""

    @wraps(original)
    def __call__(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not sessions.are_open():
            return original(layer, *args, **kwargs)
        strategy = sessions.visited()
        visit = nullcontext() if strategy is None else strategy.scope(visiting=True)
        with visit, inside(layer.path or layer.name):
            return original(layer, *args, **kwargs)

    return __call__
