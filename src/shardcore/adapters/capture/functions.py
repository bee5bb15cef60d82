"""Functions that read a tensor on the host, or check its values, without an operator."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardcore.adapters.torch_compat import Args, Kwargs

# Named operands that are numbers: torch reads them from tensors.
NUMBERS = ("alpha", "value")

_SEED_BITS = 0xFFFFFFFF

_READS = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.data_ptr,
}


class FunctionListener(TorchFunctionMode):
    """Observes functions of torch that this thread calls, which no operator shows.

    Args:
        read: Called with a tensor whose values are read on the host, and how.
        numbers: Entered while torch reads a number from a tensor that is a named operand.
        at_once: Replaces a function that reads values only to check them; called with it and its
            operands.
    """

    def __init__(
        self,
        read: Callable[[Any, str], None],
        numbers: Callable[[], AbstractContextManager[None]],
        at_once: Callable[[Any, Args, Kwargs], Any],
    ) -> None:
        super().__init__()
        self._read, self._numbers, self._at_once = read, numbers, at_once

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            self._read(args[0], f"Tensor.{func.__name__}()")
        if func is torch.nn.functional.one_hot and _is_checked(*args, **kwargs):
            return self._at_once(func, args, kwargs)
        if kwargs and any(isinstance(kwargs.get(name), torch.Tensor) for name in NUMBERS):
            with self._numbers():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_checked(tensor: Any, num_classes: int = -1) -> bool:
    """Returns whether `one_hot` reads values on the host only to check the range of classes."""
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu" and num_classes > 0


def seeded_generator(seed: torch.Tensor) -> torch.Generator:
    """Returns a generator with the value of `seed`, as `keras.random` makes it on torch."""
    generator = torch.Generator(device=seed.device)
    generator.manual_seed(int(seed) & _SEED_BITS)
    return generator


@cache
def seeded_by_tensor(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `draw` with its seed in a tensor: one function for each, to compare recordings."""

    @wraps(draw)
    def draw_with(seed: torch.Tensor, **operands: Any) -> Any:
        return draw(**operands, seed=int(seed) & _SEED_BITS)

    return draw_with
