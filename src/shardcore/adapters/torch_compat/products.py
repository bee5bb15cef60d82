"""Products of matrices by oneDNN, which torch leaves to MKL."""

import functools
import platform
from pathlib import Path
from typing import Any

import torch


class OneDnn:
    """An operator for products by oneDNN, which torch knows until `close()`.

    Inductor does not look into an operator that it does not know, and calls it as it is.
    """

    def __init__(self) -> None:
        self._library: torch.library.Library | None = None

    def product(self) -> Any:
        """Of two matrices of float32 on a CPU, or of two batches of one matrix each."""
        if self._library is None:
            self._library = torch.library.Library("shardcore", "DEF")  # type: ignore[no-untyped-call]
            self._library.define("product(Tensor left, Tensor right) -> Tensor")  # type: ignore[no-untyped-call]
            self._library.impl("product", _product, "CPU")  # type: ignore[no-untyped-call]
            self._library.impl("product", _form, "Meta")  # type: ignore[no-untyped-call]
        return torch.ops.shardcore.product.default

    def close(self) -> None:
        """Torch forgets the operator: a library takes it along."""
        self._library = None


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    # torch 2.13: oneDNN multiplies matrices of float32 by no public name. This one takes operands
    # as they lie, a transposed one too; called by Inductor it would get a copy of the second.
    if left.dim() == 3:
        return _product(left[0], right[0])[None]
    linear = torch.ops.mkldnn._linear_pointwise.default
    made: torch.Tensor = linear(left, right.t(), None, "none", [], "")
    return made


def _form(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.new_empty((*left.shape[:-1], right.shape[-1]))


def has_onednn() -> bool:
    """Whether torch was built with oneDNN, for a processor that it is written for."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return is_x86 and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


@functools.cache
def is_intel() -> bool:
    """Whether the processor is one of Intel's, for which MKL is written."""
    described = Path("/proc/cpuinfo")  # of Linux
    return "GenuineIntel" in (described.read_text() if described.exists() else platform.processor())
