"""The generators and settings that a rank takes over, and the memory that its parent holds."""

import gc
import random
import sys
from collections.abc import Iterator
from typing import Any

import attrs

from shardcore.reporting.logs import log_of


@attrs.frozen(eq=False)
class ProcessState:
    """Generators and settings of a process, as far as it has loaded their packages.

    Args:
        python: The state of Python's generator.
        numpy: That of NumPy's global generator; None if it is not loaded.
        torch: That of torch; None if it is not loaded.
    """

    python: Any
    numpy: Any
    torch: "TorchState | None"

    @classmethod
    def now(cls) -> "ProcessState":
        """Reads the state of this process, of what it has loaded."""
        numpy = sys.modules.get("numpy")
        torch = TorchState.now() if "torch" in sys.modules else None
        return cls(random.getstate(), numpy and numpy.random.get_state(), torch)

    def restore(self) -> None:
        """Restores it. Last: what is imported or made after it may draw."""
        random.setstate(self.python)
        if self.numpy is not None:
            import numpy

            numpy.random.set_state(self.numpy)
        if self.torch is not None:
            self.torch.restore()


@attrs.frozen(eq=False)
class TorchState:
    """Generators and settings of torch.

    Args:
        seed: The seed, for devices that this process has not used.
        cpu: The state of the generator of the CPU.
        cuda: That of the current device; None if CUDA was not used.
        dtype: The default dtype.
        precision: The precision of products of float32.
        deterministic: Whether algorithms are to be deterministic; whether one that is not warns.
        cudnn: Whether cuDNN tries algorithms, and takes deterministic ones only.
    """

    seed: int
    cpu: Any
    cuda: Any
    dtype: Any
    precision: str
    deterministic: tuple[bool, bool]
    cudnn: tuple[bool, bool]

    @classmethod
    def now(cls) -> "TorchState":
        """Reads the state of this process; that of CUDA only if it was used."""
        import torch

        return cls(
            torch.initial_seed(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if _uses_cuda() else None,
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        )

    def restore(self) -> None:
        """Restores it: the seed first, for devices that the other process has not used."""
        import torch

        torch.manual_seed(self.seed)  # of all devices
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        enabled, warns = self.deterministic
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = self.cudnn


def _uses_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


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
