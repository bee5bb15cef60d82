"""Operators that write into operands, views with separate memory, and the fall-back (ADR 6).

A target keeps its layout. A write into such a view reaches the base and all its views. The
fall-back runs an operator on full operands on every rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.recording.functions import REPLACES_MEMORY
from shardcore.adapters.capture.recording.recorder import recording
from shardcore.adapters.engine.redistribution import full, in_layout, local_shard, reduced
from shardcore.adapters.engine.tensor import Copied, Memory, ShardedTensor, is_dense
from shardcore.adapters.torch_private import is_view, tree_leaves, tree_map_only, written_operands
from shardcore.adapters.torch_private.operators import Operator
from shardcore.domain.engine.rules.rule import fits
from shardcore.domain.errors import ShardedTensorError
from shardcore.domain.layouts.derived_layouts import broadcast_layout
from shardcore.ports.measurement import layer_scope
from shardcore.reporting.logs import log_of

aten = torch.ops.aten

# They add partial tensors of one layout to a partial tensor of that layout.
ADDING = {aten.add_.Tensor, aten.sub_.Tensor, aten.copy_.default}
_LINEAR = {"sum", "avg"}

logger = log_of("operators")

# Operands of at most so many bytes cost nothing worth a warning.
_SMALL = 1024


def write(operator: Operator, target: Any, *others: object, **kwargs: object) -> Any:
    """Runs an operator that writes into its first operand."""
    is_sharded = isinstance(target, ShardedTensor)
    is_own = is_sharded and target.copied is None
    if is_own and target.form.is_pending and not _adds_alike(operator, others, target):
        reduce_in_place(target)
    if is_own and torch_private.is_elementwise(operator):
        plain, named = tree_map_only(
            torch.Tensor, lambda tensor: shard_like(tensor, target), (others, kwargs)
        )
        operator(target.part, *plain, **named)
        target.memory.writes += 1
        return target
    if is_own and not target.form.is_replicated:
        run_full_and_store(operator, target, *others, **kwargs)
        return target
    plain, named = tree_map_only(ShardedTensor, full, (others, kwargs))
    if not is_sharded:
        operator(target, *plain, **named)
    elif not is_own:
        write_through(target, lambda view: operator(view, *plain, **named))
    else:
        operator(target.part, *plain, **named)
        target.memory.writes += 1
    return target


def _adds_alike(operator: Operator, others: Sequence[Any], target: ShardedTensor) -> bool:
    """Finds additions of partial tensors with the layout of `target`: they need no reduction."""
    if operator not in ADDING or not {op for _, op in target.form.layout.partial} <= _LINEAR:
        return False
    tensors = [other for other in others if isinstance(other, torch.Tensor)]
    return bool(tensors) and all(
        isinstance(tensor, ShardedTensor) and is_alike(tensor, target) for tensor in tensors
    )


def is_alike(one: ShardedTensor, other: ShardedTensor) -> bool:
    """Tells whether the local shards of both hold the same elements of the full tensor."""
    a, b = one.form, other.form
    return a is b or (a.shape == b.shape and a.layout == b.layout)


def reshape(operator: Operator, target: ShardedTensor, *args: object) -> Any:
    """Runs `squeeze_` and similar operators: the tensor becomes the result of `squeeze`."""
    if target.form.is_pending and target.copied is None and target.memory.is_viewed:
        name = torch_private.aten_name(operator)
        raise ShardedTensorError(
            f"{name}_() cannot change the shape of a partial sum in place once there are views of "
            f"it: take {name}(), which returns another tensor."
        )
    is_viewed = target.memory.is_viewed
    changed = torch_private.out_of_place(operator)(target, *args)
    target.memory.is_viewed = is_viewed  # the user gets no view `changed`
    target.part, target.form = changed.part, changed.form
    if target.copied is not None:
        target.copied = changed.copied
    return torch_private.reshaped_in_place(operator, target, *args)


def replace_memory(target: ShardedTensor, value: torch.Tensor) -> None:
    """Takes over the memory of `value`, as `target.data = value` does, in its own layout.

    What shares the old memory keeps its values. The new memory is that of `value` if that has the
    layout of `target`, else a copy.
    """
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != target.form.shape:
        given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ShardedTensorError(
            f"x.data = value expected a tensor of shape {target.form.shape}, which a sharded "
            f"tensor keeps, and got {given}: make a new variable or parameter of the other shape.",
            got=str(given),
        )
    if recorder := recording():
        recorder.refuse(*REPLACES_MEMORY)
    engine = target.engine
    source = engine.as_sharded(value)
    refresh(source)
    in_own_layout = in_layout(source, target.form.layout.reduced, copies=True)
    shares = in_own_layout is source and source.copied is None
    part = in_own_layout.part if shares else in_own_layout.part.clone()
    form = engine.evolved(in_own_layout.form, weight=target.form.weight)
    torch_private.set_metadata(target, engine.wrap(part, form))
    target.part, target.form, target.copied = part, form, None
    target.memory = in_own_layout.memory if shares else Memory()


def shard_like(value: torch.Tensor, target: ShardedTensor) -> torch.Tensor:
    """Takes this rank's shard of `value`, in the layout of `target`, up to broadcasting."""
    if isinstance(value, ShardedTensor) and is_alike(value, target):
        return value.part
    if not fits(tuple(value.shape), target.form.shape):
        _refuse_shapes(value, target)
    engine = target.engine
    wanted = broadcast_layout(target.form.layout, target.form.shape, tuple(value.shape))
    sharded = engine.adopt(value)
    if sharded is None:
        return local_shard(value, wanted, engine)
    return in_layout(sharded, wanted).part


def _refuse_shapes(value: torch.Tensor, target: ShardedTensor) -> None:
    """Raises torch's error about a `value` that is not broadcast to the shape of `target`.

    The local shards may have shapes that fit.
    """
    torch.empty(target.shape, device="meta").copy_(torch.empty(value.shape, device="meta"))


def note_view(
    view: ShardedTensor,
    base: ShardedTensor,
    take: Callable[[torch.Tensor], torch.Tensor],
    *,
    is_copy: bool,
) -> None:
    """Registers `view` as a view of `base`, which may be a view itself.

    `take` takes the same view of the full value of `base`. With `is_copy`, their local shards have
    separate memory.
    """
    view.memory, before = base.memory, base.copied
    if before is not None:
        first = before.take
        view.copied = attrs.evolve(before, take=lambda tensor: take(first(tensor)))
    elif is_copy:
        # A base may change its shape in place: its views then stay views of the old shape, which
        # this copy of it keeps. A pending base has no such copy: it would be reduced twice.
        if base.form.is_pending:
            base.memory.is_viewed = True
        else:
            base = base.engine.wrap(base.part, base.form, base.memory)
        view.copied = Copied(base, take, base.memory.writes)


def refresh(view: ShardedTensor) -> None:
    """Updates a view that is a copy, if its base was written since. A collective."""
    copied = view.copied
    if copied is None or copied.base.memory.writes == copied.writes:
        return
    _store(view, copied, copied.take(full(copied.base)))


def write_through(view: ShardedTensor, write: Callable[[torch.Tensor], Any]) -> None:
    """Writes into a view that is a copy: `write` gets its full value, and its base the result."""
    copied = view.copied
    assert copied is not None, "it shares the memory of its base"
    reduce_in_place(copied.base)
    base = copied.base
    value = full(base).clone(memory_format=torch.contiguous_format)
    written = copied.take(value)
    write(written)
    base.part.copy_(local_shard(value, base.form.layout, base.engine))
    base.memory.writes += 1
    _store(view, copied, written)


def _store(view: ShardedTensor, copied: Copied, value: torch.Tensor) -> None:
    """Replaces the local shard of `view`: that of a partial base must not be overwritten."""
    view.form = view.engine.evolved(view.form, layout=view.form.layout.reduced)
    part = local_shard(value, view.form.layout, view.engine)
    view.part = part.clone(memory_format=torch.contiguous_format)
    view.copied = attrs.evolve(copied, writes=copied.base.memory.writes)


def reduce_in_place(target: ShardedTensor) -> None:
    """Reduces `target` in place."""
    if target.form.is_pending:
        done = reduced(target)
        target.part.copy_(done.part)
        target.memory.writes += 1
        target.form = target.engine.evolved(target.form, layout=target.form.layout.reduced)


def warn_fallback(operator: object, args: object) -> None:
    """Counts a call in the engine of its sharded operands, and warns at the first large one."""
    operands = _sharded_in(args)
    engine, size = operands[0].engine, sum(operand.nbytes for operand in operands)
    engine.fallbacks[str(operator)] += 1
    if size <= _SMALL or str(operator) in engine.warned:
        return
    engine.warned.add(str(operator))
    shapes = ", ".join(
        f"{tuple(operand.shape)} as [{', '.join(map(str, operand.mesh_layout.placements))}]"
        for operand in operands
    )
    logger.warning(
        "Operator %s%s cannot be sharded for %s: its operands are replicated first (%d bytes). "
        "The result is right; each rank does all of the work of this operator.",
        operator,
        f" in layer {layer!r}" if (layer := layer_scope.now()) else "",
        shapes,
        size,
    )


def count_fallbacks(args: object) -> int:
    """Counts the calls so far in the engine of sharded operands; 0 if none is sharded."""
    return next((tensor.engine.fallbacks.total() for tensor in _sharded_in(args)), 0)


def _sharded_in(args: object) -> list[Any]:
    return [leaf for leaf in torch_private.tree_leaves(args) if hasattr(leaf, "mesh_layout")]


def run_full(operator: Operator, *args: Any, **kwargs: object) -> Any:
    """Runs the operator on full operands; the results are replicated."""
    tensors = _sharded_in((args, kwargs))
    if not all(tensor.form.is_replicated for tensor in tensors):
        warn_fallback(operator, tensors)
    plain_args, plain_kwargs = tree_map_only(ShardedTensor, full, (args, kwargs))
    result = operator(*plain_args, **plain_kwargs)
    engine = tensors[0].engine
    wrapped = tree_map_only(
        torch.Tensor,
        lambda tensor: engine.replicated(tensor) if is_dense(tensor) else tensor,
        result,
    )
    if is_view(operator) and isinstance(args[0], ShardedTensor):
        base, *numbers = args
        for at, view in enumerate(tree_leaves(wrapped)):
            if not isinstance(view, ShardedTensor):
                continue

            def take(tensor: torch.Tensor, at: int = at) -> Any:
                return tree_leaves(operator(tensor, *numbers, **kwargs))[at]

            note_view(view, base, take, is_copy=not base.form.is_replicated)
    return wrapped


def run_full_and_store(operator: Operator, *args: object, **kwargs: object) -> Any:
    """Runs an operator that writes on full operands, and stores the written ones."""
    tensors = _sharded_in((args, kwargs))
    engine = tensors[0].engine
    warn_fallback(operator, tensors)
    written = written_operands(operator, args, kwargs)
    targets: list[Any] = [target for target in written if isinstance(target, ShardedTensor)]
    # A copy of each: a write must reach no other operand.
    values = {id(tensor): full(tensor).clone() for tensor in tensors}
    plain_args, plain_kwargs = tree_map_only(
        ShardedTensor, lambda tensor: values[id(tensor)], (args, kwargs)
    )
    result = operator(*plain_args, **plain_kwargs)
    for target in targets:
        value = values[id(target)]
        if value.shape != target.shape:
            raise ShardedTensorError(
                f"{operator} writes a tensor of shape {tuple(value.shape)} into a sharded tensor "
                f"of shape {tuple(target.shape)}, and the shape of a sharded tensor cannot change: "
                "give one of the shape of the result, or none."
            )
        write(aten.copy_.default, target, value)
    by_value = {id(values[id(target)]): target for target in targets}

    def returned(tensor: torch.Tensor) -> Any:
        return by_value[id(tensor)] if id(tensor) in by_value else engine.replicated(tensor)

    return tree_map_only(torch.Tensor, returned, result)
