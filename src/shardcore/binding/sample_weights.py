"""Seam: the mask of a loss, by which Keras multiplies sample weights in place.

On one device this changes a tensor of weights: the metrics of the step see the product. It does not
change an array, of which Keras makes a new tensor at each use. shardcore keeps both, but copies the
user's tensor first, since a rank would change its own rows only.
"""

from collections.abc import Callable
from typing import Any

import torch

from shardcore.binding import batches, seams
from shardcore.binding.session import Session


def distribute(data: list[Any], session: Session) -> list[Any]:
    """Returns the batches of a step as global batches, with sample weights that it may write to."""
    distributed: list[Any] = batches.distribute([_own(batch) for batch in data], session)
    for before, after in zip(data, distributed, strict=True):
        if _has_weights(before):
            weights = zip(seams.leaves(before[2]), seams.leaves(after[2]), strict=True)
            for array, tensor in weights:
                if isinstance(tensor, torch.Tensor) and not isinstance(array, torch.Tensor):
                    session.arrays.add(_memory(tensor))
    return distributed


def _own(batch: Any) -> Any:
    if not _has_weights(batch):
        return batch
    x, y, weights = batch
    return x, y, seams.map_tensors(torch.clone, weights)


def _has_weights(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 3


def mask(
    session: Session, original: Callable[..., Any], sample_weight: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces `apply_mask`, so that it does not change weights that were an array."""
    if _was_array(sample_weight, session):
        sample_weight = sample_weight.clone()
    return original(sample_weight, *args, **kwargs)


def _was_array(weights: Any, session: Session) -> bool:
    """Returns whether `weights` are, or are a view of, the tensor of a user's array.

    Keras passes that tensor, or a copy in another dtype, which may be written to. A custom loss may
    pass a view, which has separate memory if a split dim is viewed.
    """
    copied = getattr(weights, "copied", None)
    tensors = (weights, getattr(copied, "base", None))
    return any(
        isinstance(each, torch.Tensor) and _memory(each) in session.arrays for each in tensors
    )


def _memory(tensor: Any) -> torch.UntypedStorage:
    """Returns the address of a tensor's memory; of a sharded one, of this rank's part."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    memory: torch.UntypedStorage = part.untyped_storage()
    return memory
