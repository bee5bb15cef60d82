"""The call of a tape that reads a number on the host."""

from typing import Any

import torch

from shardcore.domain.capture import OtherWay


def check(tensor: torch.Tensor, number: Any) -> None:
    """Go on if `tensor` holds what it held when the step was recorded.

    Raises:
        OtherWay: If it holds another number.
    """
    if tensor.item() != number:
        raise OtherWay
