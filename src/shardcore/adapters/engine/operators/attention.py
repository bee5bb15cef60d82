"""Attention and its gradient: sharded by rows and heads, or in a ring by the sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.operators.attention_call import AttentionCall
from shardcore.adapters.engine.operators.ring_attention import RingAttention, RingExchange
from shardcore.adapters.engine.task import Compute, Handler, Operand, Parts, Planner, Task, order_of
from shardcore.adapters.torch_private import Operator, unnamed_operators
from shardcore.domain.engine.choice import Sharding
from shardcore.domain.engine.ring import Ring
from shardcore.domain.engine.rules import layers
from shardcore.domain.engine.rules.rule import OperatorRule
from shardcore.domain.layouts.memory_order import Order

# The factors of the lengths, which only a ring shards, and the dim that has them.
_LENGTHS = frozenset({"q", "k"})
_LENGTH = 2
# These operators give results in the order (batch, length, heads, size), for any operands.
_BY_LENGTH = {
    unnamed_operators.CPU_ATTENTION_BACKWARD,
    unnamed_operators.EFFICIENT_ATTENTION,
    unnamed_operators.EFFICIENT_ATTENTION_BACKWARD,
}


def _forward(operator: Operator, *args: object, **kwargs: object) -> Task | Handler | None:
    call = AttentionCall.of(operator, args, kwargs)
    if not call.can_be_sharded:
        return None
    if call.mask is not None and call.mask.ndim < 4:
        return _with_large_mask
    rule = layers.attention(*_dims(call))
    operands = [*call.inputs, *([] if call.mask is None else [call.mask])]

    def compute(parts: Parts) -> Sequence[Any]:
        query, key, value, *masks = parts
        return call.output(query, key, value, masks[0] if masks else None, causal=call.causal)

    orders = _orders(operator, call.inputs[:1])
    return _task(call, rule, operands, orders, compute, lambda ring: ring.forward)


def _backward(operator: Operator, *args: object, **kwargs: object) -> Task | Handler | None:
    call = AttentionCall.of(operator, args, kwargs)
    if not call.can_be_sharded:
        return None
    if call.mask is not None and call.mask.ndim < 4:
        return _with_large_mask
    states = call.states.values()
    others = tuple(state.ndim for state in states)
    rule = layers.attention_backward(*_dims(call), call.trains_mask, others)
    masks = [] if call.mask is None else [call.mask]
    operands = [call.gradient, *call.inputs, *call.results, *masks, *states]

    def compute(parts: Parts) -> Sequence[Any]:
        given, rest = parts[:6], parts[6:]
        mask = rest[0] if masks else None
        return call.gradients(given, mask, rest[len(masks) :], causal=call.causal)

    orders = _orders(operator, call.inputs)
    return _task(call, rule, operands, orders, compute, lambda ring: ring.backward)


def _task(
    call: AttentionCall,
    rule: OperatorRule,
    operands: Sequence[Operand],
    orders: Sequence[Order | None],
    compute: Compute,
    in_ring: Callable[[RingAttention], Compute],
) -> Task:
    """Plans `call` by its rule; in a ring it runs `in_ring`, else `compute`."""
    ring = _ring(call)
    if ring is None:
        return Task(rule.without(_LENGTHS), operands, compute, orders=orders)

    def over(engine: Engine, sharding: Sharding) -> Compute:
        _, key, _ = call.inputs
        layout = sharding.operands[operands.index(key)]
        exchange = RingExchange(engine, ring.axis, key.form, layout, _LENGTH - key.ndim)
        return in_ring(RingAttention(call, exchange, striped=layout.segments[_LENGTH] > 1))

    return Task(rule, operands, orders=orders, ring=ring, over=over)


def _orders(operator: Operator, operands: Sequence[Operand]) -> list[Order | None]:
    return [(0, 2, 1, 3) if operator in _BY_LENGTH else order_of(operand) for operand in operands]


def _dims(call: AttentionCall) -> tuple[str, str | None]:
    mask = None if call.mask is None else call.mask.shape
    return layers.attention_dims([operand.shape for operand in call.inputs], mask)


def _ring(call: AttentionCall) -> Ring | None:
    """Finds the ring, if one axis alone shards the lengths of query, key and value."""
    query, key, _ = call.inputs
    layouts = [operand.form.layout for operand in call.inputs]
    ring = Ring.of(layouts, _LENGTH, _LENGTHS, causal=call.causal)
    if ring is None or call.trains_mask:
        return None
    if call.causal and (query.shape[_LENGTH] != key.shape[_LENGTH] or call.mask is not None):
        return None
    if call.mask is not None and call.mask.shape[-1] != key.shape[_LENGTH]:
        return None  # one column for all keys
    return ring


def _with_large_mask(operator: Operator, *args: object, **kwargs: object) -> Any:
    """Adds dims for batch and heads to a mask of (length, length), and runs `operator`."""
    call = AttentionCall.of(operator, args, kwargs)
    mask: torch.Tensor = call.arguments[call.mask_name]
    large = mask[(None,) * (4 - mask.ndim)]
    return operator(**{**call.arguments, call.mask_name: large})


PLANNERS: dict[Any, Planner] = {
    unnamed_operators.CPU_ATTENTION: _forward,
    unnamed_operators.CPU_ATTENTION_BACKWARD: _backward,
    unnamed_operators.FLASH_ATTENTION: _forward,
    unnamed_operators.FLASH_ATTENTION_BACKWARD: _backward,
    unnamed_operators.EFFICIENT_ATTENTION: _forward,
    unnamed_operators.EFFICIENT_ATTENTION_BACKWARD: _backward,
    unnamed_operators.CUDNN_ATTENTION: _forward,
    unnamed_operators.CUDNN_ATTENTION_BACKWARD: _backward,
}
