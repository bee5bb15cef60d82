"""Seams: the random draws of Keras, whose seed is state of a recorded step."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from shardcore.binding import seams
from shardcore.binding.session import Sessions
from shardcore.ports.capture import StepCapture


def generator(
    original: Callable[[Any], Any], sessions: Sessions, capture: StepCapture
) -> Callable[[Any], Any]:
    """`torch_seed_generator`: Keras' own, but in a step that is being recorded."""

    @wraps(original)
    def torch_seed_generator(seed: Any) -> Any:
        if not capture.is_recording() or seams.is_symbolic():
            return original(seed)
        return capture.generator(_next_seed(seed, sessions))

    return torch_seed_generator


def draw(
    original: Callable[..., Any], sessions: Sessions, capture: StepCapture
) -> Callable[..., Any]:
    """`beta`, `binomial` and `gamma`: Keras' own, but in a step that is being recorded.

    They set the generators of all devices, and put back that of the CPU.
    """

    @wraps(original)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        operands = inspect.signature(original).bind(*args, **kwargs).arguments
        seed = operands.pop("seed", None)
        alone = not torch.cuda.is_available() and all(map(_is_plain, seams.leaves(operands)))
        if not capture.is_recording() or seams.is_symbolic() or not alone:
            return original(*args, **kwargs)
        return capture.drawn(original, _next_seed(seed, sessions), operands)

    return drawn


def _is_plain(operand: Any) -> bool:
    """Whether a recording can hold it: no sharded tensor, and no array of NumPy."""
    return type(operand) in _PLAIN


_PLAIN = (torch.Tensor, torch.Size, torch.dtype, bool, int, float, str, type(None))


def _next_seed(seed: Any, sessions: Sessions) -> Any:
    """The next seed of `seed`, as a plain tensor of one number."""
    first, second = seams.draw_seed(seed)
    total = first + second
    strategy = sessions.keeper(total)
    return total if strategy is None else strategy.whole(total)
