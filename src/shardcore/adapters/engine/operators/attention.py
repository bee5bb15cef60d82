"""Attention and its gradient: split by rows and heads, or in a ring by the sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.moves.passing import Passing
from shardcore.adapters.engine.operators.ring_attention import RingAttention
from shardcore.adapters.engine.plans.task import (
    Compute,
    Handler,
    Operand,
    Operator,
    Order,
    Planner,
    Task,
    order_of,
)
from shardcore.adapters.torch_private import unnamed_operators
from shardcore.domain.planner.choice import Split
from shardcore.domain.planner.ring import Ring
from shardcore.domain.rules import layers
from shardcore.domain.rules.rule import OperatorRule

# The factors of the lengths, which only a ring splits, and the dim that has them.
_LENGTHS = frozenset({"q", "k"})
_LENGTH = 2


@attrs.frozen(eq=False)
class _Attention:
    """A call of an attention, or of its gradient."""

    operator: Operator
    inputs: tuple[Operand, Operand, Operand]  # query, key and value
    mask: Operand | None
    dropout: float
    causal: bool
    scale: float | None

    def task(
        self,
        rule_of: Callable[[str, str | None], OperatorRule],
        operands: Sequence[Operand],
        orders: Sequence[Order | None],
        compute: Callable[[RingAttention], Compute],
    ) -> Task:
        """Returns the task of the call, by the rule for its dims; in a ring it runs `compute`."""
        rule = rule_of(*self._dims())
        given = [*operands, *([] if self.mask is None else [self.mask])]
        ring = self._ring()
        if ring is None:
            return Task(rule.without(_LENGTHS), given, orders=orders)

        def over(engine: Engine, split: Split) -> Compute:
            _, key, _ = self.inputs
            layout = split.operands[operands.index(key)]
            passing = Passing(engine, ring.axis, key.form, layout, _LENGTH - key.ndim)
            striped = layout.segments[_LENGTH] > 1
            return compute(RingAttention(self.operator, passing, self.causal, striped, self.scale))

        return Task(rule, given, orders=orders, ring=ring, over=over)

    def _dims(self) -> tuple[str, str | None]:
        """Returns the first dims of query, key and value, and those of the mask, for the rule."""
        query, *others = self.inputs
        heads = [
            letter if all(each.shape[dim] == query.shape[dim] for each in others) else "-"
            for dim, letter in enumerate("bh")
        ]
        if self.mask is None:
            return " ".join(heads), None
        sizes = zip([*heads, "q"], self.mask.shape, query.shape, strict=False)
        return " ".join(heads), " ".join(each if mask == of else "-" for each, mask, of in sizes)

    def _ring(self) -> Ring | None:
        """Returns the ring, if one axis alone splits the lengths of query, key and value."""
        query, key, _ = self.inputs
        axes = {each.form.layout.dim_axes(_LENGTH) for each in self.inputs}
        if len(axes) > 1 or not query.is_split(_LENGTH) or self.dropout:
            return None
        (axis, *others), sizes = axes.pop(), {query.shape[_LENGTH], key.shape[_LENGTH]}
        if others or (self.causal and (len(sizes) > 1 or self.mask is not None)):
            return None
        if self.mask is not None and self.mask.shape[-1] != key.shape[_LENGTH]:
            return None  # one column for all keys
        return Ring(axis, _LENGTHS, self.causal)


def _forward(
    operator: Operator,
    query: Operand,
    key: Operand,
    value: Operand,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Operand | None = None,
    scale: float | None = None,
) -> Task | Handler:
    """Plans CPU flash attention."""
    if attn_mask is not None and attn_mask.ndim < 4:
        return _with_large_mask
    inputs = (query, key, value)
    call = _Attention(operator, inputs, attn_mask, dropout, causal, scale)
    return call.task(layers.attention, inputs, [order_of(query)], lambda ring: ring.forward)


def _backward(
    operator: Operator,
    gradient: Operand,
    query: Operand,
    key: Operand,
    value: Operand,
    output: Operand,
    sums: Operand,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Operand | None = None,
    scale: float | None = None,
) -> Task | Handler:
    """Plans its gradient, which has the order (batch, length, heads, size), for any query."""
    if attn_mask is not None and attn_mask.ndim < 4:
        return _with_large_mask
    call = _Attention(operator, (query, key, value), attn_mask, dropout, causal, scale)
    operands = (gradient, query, key, value, output, sums)
    orders = [(0, 2, 1, 3)] * 3
    return call.task(layers.attention_backward, operands, orders, lambda ring: ring.backward)


def _with_large_mask(
    operator: Operator, *args: object, attn_mask: torch.Tensor, **kwargs: object
) -> Any:
    """Adds dims for batch and heads to a mask of (length, length), and runs `operator`."""
    return operator(*args, attn_mask=attn_mask[(None,) * (4 - attn_mask.ndim)], **kwargs)


PLANNERS: dict[Any, Planner] = {
    unnamed_operators.CPU_ATTENTION: _forward,
    unnamed_operators.CPU_ATTENTION_BACKWARD: _backward,
}
