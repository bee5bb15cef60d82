"""The task of the planner: an operator's operands, without values, and its sharding rule."""

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import attrs
import torch

from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.redistributed import Redistributed
from shardcore.adapters.engine.tensor import Form
from shardcore.adapters.torch_private import Operator as Operator
from shardcore.adapters.torch_private import aten_name, is_view
from shardcore.domain.engine.call import Shapes
from shardcore.domain.engine.choice import Sharding
from shardcore.domain.engine.ring import Ring
from shardcore.domain.engine.rules.rule import OperatorRule
from shardcore.domain.layouts.memory_order import Order as Order
from shardcore.domain.layouts.memory_order import inverse, memory_order, strides_in

# Takes an operator and its arguments, sharded tensors among them, and runs it.
Handler = Callable[..., Any]
Parts = Sequence[torch.Tensor]
Compute = Callable[[Parts], Sequence[Any]]


@attrs.frozen(eq=False)
class Operand:
    """A tensor among the arguments of an operator, without its values."""

    form: Form
    number: int  # its number among all tensors of the call
    other: Form | None = None  # the form of its redistributed copy, if there is one
    serves: bool = False  # whether products read that copy

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.form.shape

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.form.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self.form.dtype

    def is_sharded(self, dim: int) -> bool:
        """Returns whether several ranks shard `dim`."""
        return self.ndim > 0 and prod(self.form.layout.ranks(dim % self.ndim)) > 1

    def numel(self) -> int:
        """The number of elements of the full tensor."""
        return prod(self.form.shape)


def operand(operator: Operator, form: Form, number: int, known: Redistributed | None) -> Operand:
    """Returns an operand of `operator`; a partial one as its reduced copy, if it has one."""
    if known is None:
        return Operand(form, number)
    other = known.tensor.form
    if form.is_pending and not is_view(operator):
        return Operand(other, number, other)
    return Operand(form, number, other, known.serves)


@attrs.frozen(eq=False)
class Task:
    """An operator to be sharded by a rule."""

    rule: OperatorRule  # its sharding rule
    operands: Sequence[Operand]  # its tensors, as many as the rule has
    # Runs it on local shards, in the order of `operands`, and returns those of the results, None
    # for a result that is not requested. What it returns besides the results of the rule is equal
    # on all ranks, and is handed on as it is. None runs the operator itself on its arguments, with
    # the local shards in the place of tensors.
    compute: Compute | None = None
    result_shapes: Shapes = ()  # the global shapes of the results, if these may stay partial
    # The operands, by position, in each of which it is linear: if only that one is a partial sum,
    # the results are partial sums.
    linear_in: Sequence[int] = ()
    # The operands, by position, that it adds, or chooses from: if one of them is a partial sum, the
    # results are partial, and the first rank adds the other operands.
    adds: Sequence[int] = ()
    of_weights: bool = False  # whether its results are weights if all operands are
    scales: bool = False  # whether it multiplies element by element
    # Per result the order of its dims in memory, outermost first; None, or missing, for a result
    # whose last dim is innermost.
    orders: Sequence[Order | None] = ()
    # The layouts of operands and results, if they do not follow from the rule.
    layouts: Sharding | None = None
    # The axis around which ranks pass parts on, if there is one.
    ring: Ring | None = None
    # Makes `compute` for a sharding, if it depends on that.
    over: Callable[[Engine, Sharding], Compute] | None = None


# Takes the arguments of a handler, with an `Operand` in the place of each tensor. Returns the task
# of the operator, or the handler that runs it, or None if it runs on full operands.
Planner = Callable[..., Task | Handler | None]

_Entry = TypeVar("_Entry")


def by_operator(entries: Mapping[str, _Entry]) -> dict[Any, _Entry]:
    """Returns the entries by operator; a key has the names of several: "max max.dim"."""
    return {
        getattr(getattr(torch.ops.aten, packet), overload or "default"): entry
        for names, entry in entries.items()
        for packet, _, overload in (name.partition(".") for name in names.split())
    }


def dims_of_plane(operator: Operator) -> int:
    """Returns the number of dims of the planes of `operator`: 2 for "avg_pool2d"."""
    match = re.search(r"(\d)d", aten_name(operator))
    assert match is not None, "an operator on planes has a name with their dims"
    return int(match[1])


def order_of(operand: Operand) -> Order | None:
    """Returns the dims of `operand`, outermost in memory first; None if contiguous, or with gaps.

    An operator on images returns its result in the order of its operand, as in torch.
    """
    form = operand.form
    if form.ndim < 3 or form.is_contiguous:
        return None
    order = memory_order(form.strides)
    return order if strides_in(order, form.shape) == form.strides else None


def in_order(part: torch.Tensor, order: Order | None) -> torch.Tensor:
    """Returns `part` without gaps, its dims in memory in `order`."""
    if order is None:
        return part.contiguous()
    return part.permute(order).contiguous().permute(inverse(order))
