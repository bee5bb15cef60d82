"""The last resort: an operator on whole operands, on each rank."""

from typing import Any

import torch

from shardcore.adapters import fallback
from shardcore.adapters.slices.tensor import (
    Slice,
    cut,
    note_copy,
    replicated,
    whole,
    without_pending,
)
from shardcore.adapters.torch_compat import is_view, tree_leaves, tree_map_only, written_operands
from shardcore.domain.errors import StrategyError


def run_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator on whole operands; results are whole."""
    slices = _slices((args, kwargs))
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


def run_whole_and_store(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that writes into other operands than its first, as into `out=`.

    Raises:
        StrategyError: If it changes the shape of one, or one is a view of a split dim.
    """
    slices = _slices((args, kwargs))
    fallback.tell(operator, slices)
    targets = [each for each in written_operands(operator, args, kwargs) if isinstance(each, Slice)]
    # Of each its own: what is written must reach no other operand.
    values = {id(each): whole(each).clone() for each in slices}
    plain_args, plain_kwargs = tree_map_only(Slice, lambda each: values[id(each)], (args, kwargs))
    result = operator(*plain_args, **plain_kwargs)
    for each in targets:
        _store(operator, each, values[id(each)])
    written = {id(values[id(each)]): each for each in targets}

    def returned(tensor: torch.Tensor) -> Slice:
        return written[id(tensor)] if id(tensor) in written else replicated(tensor, world)

    world = slices[0].world
    return tree_map_only(torch.Tensor, returned, result)


def _slices(operands: Any) -> list[Slice]:
    return [leaf for leaf in tree_leaves(operands) if isinstance(leaf, Slice)]


def _store(operator: Any, target: Slice, value: torch.Tensor) -> None:
    if value.shape != target.shape or target.copied is not None:
        raise StrategyError(
            f"{operator} writes a tensor of shape {tuple(value.shape)} into a slice of shape "
            f'{tuple(target.shape)}, or into a view of a split dim. Strategy "manual" cannot do '
            "that: write tensor.copy_(result) instead."
        )
    target.mesh_layout = without_pending(target.mesh_layout)
    target.part.copy_(cut(value, target.mesh_layout, target.world))
    target.memory.written()
