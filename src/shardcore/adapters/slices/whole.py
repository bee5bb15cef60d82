"""The last resort: an operator on whole operands, on each rank."""

from functools import partial
from typing import Any

import torch

from shardcore.adapters import fallback
from shardcore.adapters.slices.copies import note_view, write_through
from shardcore.adapters.slices.tensor import (
    Slice,
    cut,
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
        base, *numbers = args
        for at, each in enumerate(tree_leaves(wrapped)):
            way = partial(_view, operator, numbers, kwargs, at)
            each.memory = base.memory
            note_view(each, base, way, is_copy=not base.is_whole)
    return wrapped


def _view(
    operator: Any, numbers: list[Any], kwargs: dict[str, Any], at: int, tensor: torch.Tensor
) -> torch.Tensor:
    """View number `at` that `operator` takes of `tensor`."""
    found: torch.Tensor = tree_leaves(operator(tensor, *numbers, **kwargs))[at]
    return found


def run_whole_and_store(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that writes into other operands than its first, as into `out=`.

    Raises:
        StrategyError: If it changes the shape of one.
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
    if value.shape != target.shape:
        raise StrategyError(
            f"{operator} writes a tensor of shape {tuple(value.shape)} into a slice of shape "
            f'{tuple(target.shape)}. Strategy "manual" cannot change the shape of a slice: give '
            "one of the shape of the result, or none."
        )
    if target.copied is not None:
        write_through(target, lambda view: view.copy_(value))
        return
    target.mesh_layout = without_pending(target.mesh_layout)
    target.part.copy_(cut(value, target.mesh_layout, target.world))
    target.memory.written()
