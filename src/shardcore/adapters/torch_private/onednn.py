"""Matrix products by oneDNN, for which torch uses MKL."""

import functools
import platform
from pathlib import Path
from typing import Any

import torch


class OneDnn:
    """A custom operator for products by oneDNN, registered until `close()`.

    Inductor calls a custom operator as it is.
    """

    def __init__(self) -> None:
        self._library: torch.library.Library | None = None

    def product(self) -> Any:
        """The product of two matrices of float32 on a CPU, or of two batches of one matrix each."""
        if self._library is None:
            self._library = torch.library.Library("shardcore", "DEF")  # type: ignore[no-untyped-call]
            self._library.define("product(Tensor left, Tensor right) -> Tensor")  # type: ignore[no-untyped-call]
            self._library.impl("product", _product, "CPU")  # type: ignore[no-untyped-call]
            self._library.impl("product", _form, "Meta")  # type: ignore[no-untyped-call]
        return torch.ops.shardcore.product.default

    def close(self) -> None:
        """Removes the operator from torch, with its library."""
        self._library = None


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    # torch 2.13: oneDNN's product of float32 has no public name. This one takes any strides, also
    # a transposed operand; called by Inductor it would get a copy of the second.
    if left.dim() == 3:
        return _product(left[0], right[0])[None]
    linear = torch.ops.mkldnn._linear_pointwise.default
    made: torch.Tensor = linear(left, right.t(), None, "none", [], "")
    return made


def _form(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.new_empty((*left.shape[:-1], right.shape[-1]))


def has_onednn() -> bool:
    """Checks the build, the processor and the release of torch.

    In torch 2.11 the operator ends the process if an operand is transposed or part of another
    matrix. torch 2.12 was not tried.
    """
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    is_new = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    return is_x86 and is_new and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


@functools.cache
def is_intel() -> bool:
    """Reads the vendor of the processor: MKL is optimized for Intel's."""
    described = Path("/proc/cpuinfo")  # of Linux
    return "GenuineIntel" in (described.read_text() if described.exists() else platform.processor())
