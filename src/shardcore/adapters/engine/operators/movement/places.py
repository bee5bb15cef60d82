"""Places in a sharded tensor at which `tensor_split` cuts, which torch reads in C++."""

from functools import cache
from typing import Any

import torch

from shardcore.domain.errors import LayoutError


@cache
def read_places_by_operators() -> torch.library.Library:
    """Has `tensor_split(x, places)` read places by `tolist()`, for all tensors of CPUs.

    Torch reads their memory, and a sharded tensor has none.

    Returns:
        The registration, which lasts as long as the process.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    name = "tensor_split.tensor_indices_or_sections"
    library.impl(name, _parts_between, "AutogradCPU")  # type: ignore[no-untyped-call]
    return library


def _parts_between(tensor: torch.Tensor, places: torch.Tensor, dim: int = 0) -> Any:
    if places.dtype is not torch.int64 or places.ndim > 1:
        raise LayoutError(
            "tensor_split expected places or a number of parts as int64 of at most one dim, got "
            f"{places.dtype} of {places.ndim} dims."
        )
    return torch.tensor_split(tensor, places.tolist(), dim)
