"""What a tensor of our own kind needs of torch."""

from typing import Any

import torch

# Without it, torch makes every result of an operator one of the subclass again.
NO_TORCH_FUNCTION: Any = torch.nn.Parameter.__torch_function__


def wrapper(cls: type[torch.Tensor], form: Any) -> Any:
    """A tensor of the class `cls` without memory of its own.

    torch 2.13: `_make_wrapper_subclass` is how the documentation of torch extends tensors, and has
    no public name.

    Args:
        cls: A subclass of `torch.Tensor`.
        form: Has its shape, strides, dtype and device.
    """
    return torch.Tensor._make_wrapper_subclass(
        cls, form.shape, strides=form.strides, dtype=form.dtype, device=form.device
    )
