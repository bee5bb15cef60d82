"""`tensor_split(x, indices)` with sharded indices, whose memory torch reads in C++."""

from functools import cache
from typing import Any

import torch

from shardcore.domain.errors import LayoutError


@cache
def read_indices_by_operators() -> torch.library.Library:
    """Makes `tensor_split(x, indices)` read the indices by `tolist()`, for all tensors of CPUs.

    Torch reads their memory, which a sharded tensor does not have.

    Returns:
        The registration, which lasts as long as the process.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    name = "tensor_split.tensor_indices_or_sections"
    library.impl(name, _cut_at_indices, "AutogradCPU")  # type: ignore[no-untyped-call]
    return library


def _cut_at_indices(tensor: torch.Tensor, indices: torch.Tensor, dim: int = 0) -> Any:
    if indices.dtype is not torch.int64 or indices.ndim > 1:
        raise LayoutError(
            "tensor_split expected places or a number of parts as int64 of at most one dim, got "
            f"{indices.dtype} of {indices.ndim} dims."
        )
    return torch.tensor_split(tensor, indices.tolist(), dim)
