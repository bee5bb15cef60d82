"""The global modes of torch on which the operators of a step depend: autocast, dtype and so on."""

from contextlib import ExitStack
from typing import Any

import torch

# The devices on which Keras computes.
_DEVICES = ("cpu", "cuda", "mps", "xpu")


def current() -> tuple[Any, ...]:
    """The modes that this thread is in now.

    Example:
        >>> before = current()
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     current() == before
        False
        >>> current() == before
        True
    """
    cuda: Any = torch.backends.cuda  # torch gives its functions no types
    deterministic: Any = torch.utils.deterministic
    return (
        *_autocasting(),
        *map(torch.get_autocast_dtype, _DEVICES),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        *(torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark),
        *(torch.backends.cudnn.deterministic, torch.backends.mkldnn.enabled),
        *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        *(cuda.cudnn_sdp_enabled(), torch.backends.mha.get_fastpath_enabled()),
        deterministic.fill_uninitialized_memory,
    )


def as_recorded() -> ExitStack:
    """Runs a program below autocast: its casts are part of the trace."""
    stack = ExitStack()
    for device in _autocasting():
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def keeps_casts() -> bool:
    """Whether autocast keeps weights that it has cast, until its scope ends."""
    return bool(_autocasting()) and torch.is_autocast_cache_enabled()


def _autocasting() -> list[str]:
    return [device for device in _DEVICES if torch.is_autocast_enabled(device)]
