"""The last resort: an operator on whole operands, on each rank."""

from typing import Any

import torch

from shardcore.adapters import fallback
from shardcore.adapters.slices.tensor import Slice, note_copy, replicated, whole
from shardcore.adapters.torch_compat import is_view, tree_leaves, tree_map_only


def run_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator on whole operands, on each rank; results are whole."""
    slices = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Slice)]
    if not all(each.is_whole for each in slices):
        fallback.tell(operator, slices)
    plain_args, plain_kwargs = tree_map_only(Slice, whole, (args, kwargs))
    result = operator(*plain_args, **plain_kwargs)
    world = slices[0].world
    wrapped = tree_map_only(torch.Tensor, lambda tensor: replicated(tensor, world), result)
    if is_view(operator) and isinstance(args[0], Slice):
        for each in tree_leaves(wrapped):
            each.copied, each.memory = args[0].copied, args[0].memory
            if not args[0].is_whole:
                note_copy(each, args[0])
    return wrapped
