"""Operators that write into their first operand, which keeps its layout."""

from typing import Any

import torch

from shardcore.adapters import fallback, torch_compat
from shardcore.adapters.engine.moves.redistribution import full, in_layout, local_shard
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.engine.writes.view_copies import reduce_in_place, write_through
from shardcore.adapters.torch_compat import tree_map_only
from shardcore.domain.errors import StrategyError
from shardcore.domain.layout import Layout

aten = torch.ops.aten

# They add partial tensors of one layout to a partial tensor of that layout.
ADDING = {aten.add_.Tensor, aten.sub_.Tensor, aten.copy_.default}
_LINEAR = {"sum", "avg"}


def write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that writes into its first operand."""
    target, *others = args
    is_sharded = isinstance(target, ShardedTensor)
    is_own = is_sharded and target.copied is None
    if is_own and target.is_pending and not _adds_alike(operator, others, target):
        reduce_in_place(target)
    if is_own and torch_compat.is_elementwise(operator):
        plain, named = tree_map_only(
            torch.Tensor, lambda each: shard_beside(each, target), (others, kwargs)
        )
        operator(target.part, *plain, **named)
        target.memory.written()
        return target
    plain, named = tree_map_only(ShardedTensor, full, (others, kwargs))
    if not is_sharded:
        operator(target, *plain, **named)
    elif not is_own:
        write_through(target, lambda view: operator(view, *plain, **named))
    elif target.form.is_replicated:
        operator(target.part, *plain, **named)
        target.memory.written()
    else:
        fallback.tell(operator, [target])
        value = full(target).clone()
        operator(value, *plain, **named)
        target.part.copy_(local_shard(value, target.form.layout, target.engine))
        target.memory.written()
    return target


def _adds_alike(operator: Any, others: list[Any], target: Any) -> bool:
    """Whether partial tensors are added that have the layout of `target`."""
    if operator not in ADDING or not {op for _, op in target.form.layout.partial} <= _LINEAR:
        return False
    tensors = [each for each in others if isinstance(each, torch.Tensor)]
    return bool(tensors) and all(
        isinstance(each, ShardedTensor) and is_alike(each, target) for each in tensors
    )


def is_alike(one: Any, other: Any) -> bool:
    """Whether the local shards of both hold the same places of the full tensor."""
    a, b = one.form, other.form
    return a is b or (a.shape == b.shape and a.layout == b.layout)


def reshape(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `squeeze_` and similar operators: the tensor becomes the result of `squeeze`.

    Raises:
        StrategyError: If it is pending, and views of it were made.
    """
    target = args[0]
    if target.is_pending and target.copied is None and target.memory.is_viewed:
        name = torch_compat.aten_name(operator)
        raise StrategyError(
            f"{name}_() cannot change the shape of a pending sum in place once there are views of "
            f"it: take {name}(), which gives a tensor of its own."
        )
    changed = torch_compat.out_of_place(operator)(*args, **kwargs)
    target.part, target.form = changed.part, changed.form
    if target.copied is not None:
        target.copied = changed.copied
    return torch_compat.reshaped_in_place(operator, args, kwargs, target)


def shard_beside(value: torch.Tensor, target: Any) -> torch.Tensor:
    """This rank's shard of `value`, as it meets that of `target` element by element."""
    if isinstance(value, ShardedTensor) and is_alike(value, target):
        return value.part
    engine, layout = target.engine, target.form.layout
    missing = target.ndim - value.ndim
    meets = [size == target.shape[dim + missing] for dim, size in enumerate(value.shape)]
    spec = (e if m else None for e, m in zip(layout.spec[missing:], meets, strict=True))
    blocks = (b if m else 1 for b, m in zip(layout.blocks[missing:], meets, strict=True))
    wanted = Layout(layout.mesh, tuple(spec), (), tuple(blocks))
    if not isinstance(value, ShardedTensor):
        adopted = engine.adopt(value)
        if adopted is None:
            return local_shard(value, wanted, engine)
        value = adopted
    part: torch.Tensor = in_layout(value, wanted).part
    return part
