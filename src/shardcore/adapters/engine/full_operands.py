"""The fall-back: runs an operator on full operands, on each rank."""

from typing import Any

import torch

from shardcore.adapters import fallback
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.moves.redistribution import full
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.engine.writes import note_view, write
from shardcore.adapters.torch_compat import is_view, tree_leaves, tree_map_only, written_operands
from shardcore.domain.errors import StrategyError


def run_full(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the operator on full operands; the results are replicated."""
    tensors = fallback.sharded((args, kwargs))
    if not all(each.form.is_replicated for each in tensors):
        fallback.tell(operator, tensors)
    plain_args, plain_kwargs = tree_map_only(ShardedTensor, full, (args, kwargs))
    result = operator(*plain_args, **plain_kwargs)
    wrapped = tree_map_only(torch.Tensor, tensors[0].engine.replicated, result)
    if is_view(operator) and isinstance(args[0], ShardedTensor):
        base, *numbers = args
        for at, each in enumerate(tree_leaves(wrapped)):

            def take(tensor: torch.Tensor, at: int = at) -> Any:
                return tree_leaves(operator(tensor, *numbers, **kwargs))[at]

            note_view(each, base, take, is_copy=not base.form.is_replicated)
    return wrapped


def run_full_and_store(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator that writes into other operands than its first, as into `out=`.

    Raises:
        StrategyError: If it changes the shape of an operand.
    """
    tensors = fallback.sharded((args, kwargs))
    engine: Engine = tensors[0].engine
    fallback.tell(operator, tensors)
    written = written_operands(operator, args, kwargs)
    targets: list[Any] = [each for each in written if isinstance(each, ShardedTensor)]
    # A copy of each: a write must reach no other operand.
    values = {id(each): full(each).clone() for each in tensors}
    plain_args, plain_kwargs = tree_map_only(
        ShardedTensor, lambda each: values[id(each)], (args, kwargs)
    )
    result = operator(*plain_args, **plain_kwargs)
    for each in targets:
        value = values[id(each)]
        if value.shape != each.shape:
            raise StrategyError(
                f"{operator} writes a tensor of shape {tuple(value.shape)} into a sharded tensor "
                f"of shape {tuple(each.shape)}, and the shape of a sharded tensor cannot change: "
                "give one of the shape of the result, or none."
            )
        write(torch.ops.aten.copy_.default, each, value)
    by_value = {id(values[id(each)]): each for each in targets}

    def returned(tensor: torch.Tensor) -> Any:
        return by_value[id(tensor)] if id(tensor) in by_value else engine.replicated(tensor)

    return tree_map_only(torch.Tensor, returned, result)
