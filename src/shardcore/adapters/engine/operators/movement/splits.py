"""Splits at places in a sharded tensor, which torch reads in C++ before any operator runs."""

from functools import cache
from typing import Any

import torch


@cache
def split_at_numbers() -> torch.library.Library:
    """Has `torch.tensor_split(x, places)` read the places by `tolist()`, for all tensors of CPUs.

    Torch reads their memory, and a sharded tensor has none.

    Returns:
        The registration, which lasts as long as the process.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    name = "tensor_split.tensor_indices_or_sections"
    library.impl(name, _split, "AutogradCPU")  # type: ignore[no-untyped-call]
    return library


def _split(tensor: torch.Tensor, places: torch.Tensor, dim: int = 0) -> Any:
    if places.dtype is not torch.int64 or places.ndim > 1:
        raise ValueError(
            "tensor_split expected places or a number of parts as int64 of at most one dim, got "
            f"{places.dtype} of {places.ndim} dims."
        )
    return torch.tensor_split(tensor, places.tolist(), dim)
