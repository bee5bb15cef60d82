"""The task of the planner: an operator's operands, without values, and its sharding rule."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, TypeVar

import attrs
import torch

from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.redistribution import Redistributed
from shardcore.adapters.engine.tensor import Form
from shardcore.adapters.torch_private import Kwargs, aten_name, is_view, tree_leaves
from shardcore.adapters.torch_private import Operator as Operator
from shardcore.domain.engine.call import PlacedTensor, Shapes
from shardcore.domain.engine.choice import Sharding, choose
from shardcore.domain.engine.ring import Ring
from shardcore.domain.engine.rules.rule import OperatorRule
from shardcore.domain.layouts.layout import Layout
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
        """Counts ranks: an axis of one rank shards nothing."""
        return self.ndim > 0 and prod(self.form.layout.ranks(dim % self.ndim)) > 1

    def placed(self, form: Form) -> PlacedTensor:
        """Converts `form`, of the operand or of its copy, for the planner."""
        other = None if self.other is None else self.other.layout
        return PlacedTensor(
            form.shape, form.layout, form.dtype.itemsize, form.weight, other, form.repeats
        )

    def numel(self) -> int:
        """The number of elements of the full tensor."""
        return prod(self.form.shape)


def operand(operator: Operator, form: Form, number: int, known: Redistributed | None) -> Operand:
    """Replaces a partial operand of `operator` by its reduced copy, if it has one."""
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

    @property
    def forms(self) -> list[Form]:
        """The forms of the operands; a product reads redistributed copies of some."""
        sums = any(self.rule.sums(result) for result in self.rule.results)
        is_product = sums and len(self.operands) > 1
        return [
            operand.other if is_product and operand.serves and operand.other else operand.form
            for operand in self.operands
        ]

    def sharding(self, forms: Sequence[Form], engine: Engine) -> Sharding:
        """Chooses the cheapest layouts of operands, which have these `forms`, and of results."""
        if self.layouts is not None:
            return self.layouts
        if engine.gathers and not all(form.weight or not form.ndim for form in forms):
            gathered = partial(Layout.replicated, engine.world.mesh)
            forms = [
                engine.evolved(form, layout=gathered(form.ndim)) if form.weight else form
                for form in forms
            ]
        operands = zip(self.operands, forms, strict=True)
        placed = tuple(operand.placed(form) for operand, form in operands)
        if self.ring is not None:
            return self.ring.sharding(self.rule, placed, engine.costs)
        return choose(self.rule, placed, self.result_shapes, self.scales, engine.costs)

    @property
    def makes_weights(self) -> bool:
        """Whether its results count as weights: views and casts of weights alone."""
        return self.of_weights and all(operand.form.weight for operand in self.operands)


# Takes the arguments of a handler, with an `Operand` in the place of each tensor. Returns the task
# of the operator, or the handler that runs it, or None if it runs on full operands.
Planner = Callable[..., Task | Handler | None]

_Entry = TypeVar("_Entry")


def by_operator(entries: Mapping[str, _Entry]) -> dict[Any, _Entry]:
    """Looks up operators by name; a key has the names of several: "max max.dim"."""
    return {
        getattr(getattr(torch.ops.aten, packet), overload or "default"): entry
        for names, entry in entries.items()
        for packet, _, overload in (name.partition(".") for name in names.split())
    }


def dims_of_plane(operator: Operator) -> int:
    """Reads the number of dims of the planes from the name: 2 for "avg_pool2d"."""
    match = re.search(r"(\d)d", aten_name(operator))
    assert match is not None, "an operator on planes has a name with their dims"
    return int(match[1])


def order_of(operand: Operand) -> Order | None:
    """Lists the dims of `operand`, outermost in memory first; None if contiguous, or with gaps.

    An operator on images returns its result in the order of its operand, as in torch.
    """
    form = operand.form
    if form.ndim < 3 or form.is_contiguous:
        return None
    order = memory_order(form.strides)
    return order if strides_in(order, form.shape) == form.strides else None


def in_order(part: torch.Tensor, order: Order | None) -> torch.Tensor:
    """Copies `part` if it has gaps, or its dims in memory are not in `order`."""
    if order is None:
        return part.contiguous()
    return part.permute(order).contiguous().permute(inverse(order))


def tensor_positions(args: tuple[object, ...], kwargs: Kwargs | None) -> tuple[int, ...]:
    """Finds the tensors in `args`; none if lists or `kwargs` have tensors too.

    They are those of all calls of a plan: its key has the kinds of the arguments.
    """
    nested = [arg for arg in args if isinstance(arg, list | tuple)]
    if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((nested, kwargs))):
        return ()
    return tuple(n for n, arg in enumerate(args) if isinstance(arg, torch.Tensor))


def with_tensors(argument: object, others: Iterator[object]) -> Any:
    """Replaces the tensors in an argument of an operator by the next `others`."""
    if isinstance(argument, torch.Tensor):
        return next(others)
    if isinstance(argument, list | tuple):
        return [with_tensors(nested, others) for nested in argument]
    return argument
