"""An operator to be planned: its operands, without values, and the rule that splits it."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters.engine.elsewhere import Elsewhere
from shardcore.adapters.engine.tensor import Form, contiguous_strides
from shardcore.adapters.torch_compat import is_view
from shardcore.domain.planner.call import Shapes
from shardcore.domain.planner.choice import Split
from shardcore.domain.rules.rule import OperatorRule

# The dims of a tensor, outermost in memory first.
Order = tuple[int, ...]
# Takes an operator and its arguments, sharded tensors among them, and runs it.
Handler = Callable[..., Any]
Parts = Sequence[torch.Tensor]
Compute = Callable[[Parts], Sequence[torch.Tensor | None]]


@attrs.frozen(eq=False)
class Operand:
    """A tensor among the arguments of an operator, without its values.

    Args:
        form: Its form.
        number: Its number among all tensors of the call.
        other: The form that it has elsewhere, if an operator has brought it there.
        serves: Whether products read it there.
    """

    form: Form
    number: int
    other: Form | None = None
    serves: bool = False

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

    def is_split(self, dim: int) -> bool:
        """Whether several ranks split `dim`."""
        layout = self.form.layout
        axes = layout.dim_axes(dim % self.ndim) if self.ndim else ()
        return any(layout.mesh.axis_size(axis) > 1 for axis in axes)

    def numel(self) -> int:
        """The number of elements of the full tensor."""
        return int(torch.Size(self.form.shape).numel())


def operand(operator: Any, form: Form, number: int, known: Elsewhere | None) -> Operand:
    """An operand of `operator`. A pending one that was reduced is that, but for its views."""
    if known is None:
        return Operand(form, number)
    other = known.tensor.form
    if form.is_pending and not is_view(operator):
        return Operand(other, number, other)
    return Operand(form, number, other, known.serves)


@attrs.frozen(eq=False)
class Task:
    """An operator to be split by a rule.

    Args:
        rule: Its sharding rule.
        operands: Its tensors, as many as the rule has.
        compute: Runs it on local shards, in the order of `operands`; gives those of the results,
            None for a result that is not asked for. None runs the operator itself on its own
            arguments, with the local shards in the place of tensors.
        result_shapes: The global shapes of the results, where sums may be left pending.
        linear_in: The operands, by place, each of which it is linear in: where that one alone is a
            pending sum, the results are.
        adds: The operands, by place, that it adds up, or chooses from: where one of them is a
            pending sum, the results are, and the first rank adds those that are none.
        of_weights: Whether results of weights alone are weights.
        scales: Whether it multiplies element by element.
        orders: Per result the order of its dims in memory, outermost first; None, or nothing, for
            a result whose last dim is innermost.
        layouts: The layouts of operands and results, where the rule is not to be asked.
    """

    rule: OperatorRule
    operands: Sequence[Operand]
    compute: Compute | None = None
    result_shapes: Shapes = ()
    linear_in: Sequence[int] = ()
    adds: Sequence[int] = ()
    of_weights: bool = False
    scales: bool = False
    orders: Sequence[Order | None] = ()
    layouts: Split | None = None


# Takes what a handler takes, with an `Operand` in the place of each tensor. Makes the task of the
# operator; or gives the handler that runs it, or None where it is run on full operands.
Planner = Callable[..., Task | Handler | None]


def order_of(operand: Operand) -> Order | None:
    """The dims of `operand`, outermost in memory first; None for their own order, or with gaps.

    An operator on images gives its result in the order of its operand, as torch does.
    """
    form = operand.form
    if form.ndim < 3 or form.is_contiguous:
        return None
    order = tuple(sorted(range(form.ndim), key=lambda dim: (-form.strides[dim], dim)))
    return order if strides_in(order, form.shape) == form.strides else None


def strides_in(order: Order, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dims lie in memory in `order`."""
    in_memory = contiguous_strides(tuple(shape[dim] for dim in order))
    by_dim = dict(zip(order, in_memory, strict=True))
    return tuple(by_dim[dim] for dim in range(len(shape)))


def in_order(part: torch.Tensor, order: Order | None) -> torch.Tensor:
    """`part` without gaps, its dims in memory in `order`."""
    if order is None:
        return part.contiguous()
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return part.permute(order).contiguous().permute(inverse)
