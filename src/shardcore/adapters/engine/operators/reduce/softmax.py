"""Softmax along a split dim, without gathering it: the largest and the sum are reduced.

It is made of operators that are dispatched again.
"""

from collections.abc import Callable
from typing import Any

import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.engine.moves.redistribution import reduced
from shardcore.adapters.engine.operators.reduce.statistics import precise


def softmax(x: Any, dim: int, in_float: bool) -> Any:
    """`_softmax`. A row whose largest is infinite is not a number, as on one device.

    Args:
        x: A sharded tensor of floats.
        dim: The dim that sums up to one.
        in_float: Whether the result of half precision is in float32.
    """
    powers = _shifted(x, dim).exp()
    return _as_asked(powers / reduced(powers.sum(dim, keepdim=True)), x, in_float)


def log_softmax(x: Any, dim: int, in_float: bool) -> Any:
    """`_log_softmax`, with the arguments of `softmax`."""
    shifted = _shifted(x, dim)
    total = reduced(shifted.exp().sum(dim, keepdim=True))
    return _as_asked(shifted - total.log(), x, in_float)


def logsumexp(x: Any, dims: list[int], keepdim: bool = False) -> Any:
    """The logarithm of the sum of powers along `dims`, which may be infinite.

    Args:
        x: A sharded tensor of floats.
        dims: The dims that are summed.
        keepdim: Whether they stay, with size 1.
    """
    values = precise(x)
    largest = reduced(values.amax(dims, keepdim=True))
    largest = largest.masked_fill(largest.isinf(), 0)
    total = reduced((values - largest).exp().sum(dims, keepdim=True))
    found = (total.log() + largest).to(x.dtype)
    return found if keepdim else found.squeeze(dims)


def softmax_backward(gradient: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    """The gradient of the operand of `softmax`, in `dtype`."""
    gradient, probabilities = precise(gradient), precise(output)
    weighted = gradient * probabilities
    mean = reduced(weighted.sum(dim, keepdim=True))
    return (weighted - probabilities * mean).to(dtype)


def log_softmax_backward(gradient: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    """The gradient of the operand of `log_softmax`, in `dtype`."""
    gradient, logarithms = precise(gradient), precise(output)
    total = reduced(gradient.sum(dim, keepdim=True))
    return (gradient - logarithms.exp() * total).to(dtype)


def _shifted(x: Any, dim: int) -> Any:
    """`x` less the largest along `dim`, so that no power is too large."""
    values = precise(x)
    return values - reduced(values.amax(dim, keepdim=True))


def _as_asked(result: Any, x: Any, in_float: bool) -> Any:
    return result if in_float else result.to(x.dtype)


_SOFTMAX, _LOG_SOFTMAX = torch_compat.SOFTMAX
_SOFTMAX_BACKWARD, _LOG_SOFTMAX_BACKWARD = torch_compat.SOFTMAX_BACKWARD
_BY_OPERATOR: dict[Any, Callable[..., Any]] = {
    _SOFTMAX: softmax,
    _LOG_SOFTMAX: log_softmax,
    _SOFTMAX_BACKWARD: softmax_backward,
    _LOG_SOFTMAX_BACKWARD: log_softmax_backward,
    torch.ops.aten.logsumexp.default: logsumexp,
}


def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a softmax, the gradient of one, or `logsumexp`, along a dim that is split."""
    return _BY_OPERATOR[operator](reduced(args[0]), *args[1:], **kwargs)
