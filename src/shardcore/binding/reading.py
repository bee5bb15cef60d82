"""Seam: a tensor becomes a NumPy array. It is the whole value, on every rank."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from shardcore.binding.session import Sessions


def to_numpy(original: Callable[[Any], Any], sessions: Sessions) -> Callable[[Any], Any]:
    """`convert_to_numpy`: sharded tensors, alone or in a list, are gathered first."""

    def whole(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        strategy = sessions.keeper(tensor)
        return tensor if strategy is None else strategy.whole(tensor)

    @wraps(original)
    def convert_to_numpy(x: Any) -> Any:
        value = getattr(x, "value", x)  # a Keras variable
        if isinstance(value, list | tuple):
            return original([whole(getattr(each, "value", each)) for each in value])
        return original(whole(value))

    return convert_to_numpy
