"""The memory of CUDA devices that this process holds, while its ranks use them."""

import gc
import sys
from collections.abc import Iterator
from typing import Any

from shardcore.reporting.logs import log_of

logger = log_of("launch")

# Less is not worth a line.
_LEAST = 64 * 2**20
_MOST_TENSORS = 3


def release() -> None:
    """Frees the memory that torch caches, and logs how much is in use."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    gc.collect()  # models are in cycles of references
    torch.cuda.empty_cache()
    held = {at: torch.cuda.memory_allocated(at) for at in range(torch.cuda.device_count())}
    for device, size in held.items():
        if size >= _LEAST:
            tensors = ", ".join(_largest(torch, device))
            logger.warning(
                "this process holds %.2f GB of device cuda:%d, which its ranks cannot use "
                "(largest tensors: %s): delete the models and arrays that you no longer need",
                *(size / 1e9, device, tensors or "of operators"),
            )


def _largest(torch: Any, device: int) -> Iterator[str]:
    tensors = [
        tensor
        for tensor in gc.get_objects()
        if issubclass(type(tensor), torch.Tensor) and tensor.device.index == device
    ]
    tensors.sort(key=lambda tensor: tensor.nbytes, reverse=True)
    for tensor in tensors[:_MOST_TENSORS]:
        yield f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
