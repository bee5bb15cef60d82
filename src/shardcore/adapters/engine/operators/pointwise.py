"""Elementwise operators, and losses that compare an input with a target so."""

import cmath
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.engine.task import Handler, Operand, Planner, Task, by_operator, order_of
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.torch_private import Args, Operator
from shardcore.domain.engine.choice import Sharding
from shardcore.domain.engine.rules import basic
from shardcore.domain.engine.rules.rule import have_common_shape
from shardcore.domain.layouts.memory_order import Order, memory_order

aten = torch.ops.aten

# Linear in their one operand, or in each of two.
_SCALING = by_operator({"clone neg mul.Scalar div.Scalar div.Tensor": (0,), "mul.Tensor": (0, 1)})
# They add two operands, or choose between the last two.
_ADDING = by_operator({"add.Tensor sub.Tensor": (0, 1), "where.self": (1, 2)})


def plan(operator: Operator, *args: object, **kwargs: object) -> Task | None:
    """Plans a sharding of the result's dims; operands of fewer dims or of size 1 are broadcast."""
    if any(isinstance(arg, list) for arg in args):
        return None
    operands = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Operand)]
    # The buffer of `log_sigmoid` is empty on CUDA.
    if not have_common_shape([operand.shape for operand in operands if 0 not in operand.shape]):
        return None  # torch's error names the shapes of full operands
    results = torch_private.number_of_results(operator)
    sharding = _common_sharding(operands, results)
    return Task(
        basic.elementwise([operand.shape for operand in operands], results),
        operands,
        linear_in=_linear_in(operator, operands, args),
        adds=_adds(operator, operands),
        of_weights=len(operands) == 1
        or (sharding is not None and all(operand.ndim for operand in operands)),
        scales=torch_private.aten_name(operator) == "mul"
        and not any(operand.form.repeats for operand in operands),
        orders=_orders(operator, operands, **kwargs),
        layouts=sharding,
    )


def _linear_in(operator: Operator, operands: Sequence[Operand], args: Args) -> Sequence[int]:
    """Finds the operands of the result's size, which may be scaled before a reduction."""
    if operator not in _SCALING:
        return ()
    numbers = [arg for arg in args if not isinstance(arg, Operand)]
    if operator in (aten.div.Scalar, aten.div.Tensor):
        # Partial values of both signs divided by zero would sum to nan; the right sum is infinite.
        scales = isinstance(args[0], Operand) and 0 not in numbers
    else:
        scales = all(map(cmath.isfinite, numbers))
    largest = max(operand.numel() for operand in operands)
    positions = [
        position
        for position in _SCALING[operator]
        if position < len(operands) and operands[position].numel() == largest
    ]
    return positions if scales else ()


def _adds(operator: Operator, operands: Sequence[Operand]) -> Sequence[int]:
    """Finds the operands that are added, if a partial one is as large as the result."""
    positions = _ADDING.get(operator, ())
    largest = max(operand.numel() for operand in operands)
    if len(operands) <= max(positions, default=0):
        return ()  # of a tensor and a number
    pending = [operand for operand in operands if operand.form.layout.partial]
    return positions if all(operand.numel() == largest for operand in pending) else ()


def _orders(
    operator: Operator, operands: Sequence[Operand], memory_format: Any = None, **_: object
) -> list[Order | None]:
    """Takes the requested memory order, else that of the largest operand, as torch does."""
    if memory_format in (None, torch.preserve_format):
        order = order_of(max(operands, key=lambda operand: (operand.numel(), operand.ndim)))
    else:
        order = _ORDERS.get(memory_format)
    return [order] * torch_private.number_of_results(operator)


_ORDERS = {torch.channels_last: (0, 2, 3, 1), torch.channels_last_3d: (0, 2, 3, 4, 1)}


def _common_sharding(operands: Sequence[Operand], results: int) -> Sharding | None:
    """Finds the layout that all operands but numbers have, which the results get."""
    sized = [operand for operand in operands if operand.ndim or not operand.form.is_replicated]
    if not sized:
        return None
    shape, layout = sized[0].shape, sized[0].form.layout
    if any(operand.shape != shape or operand.form.layout != layout for operand in sized):
        return None
    if layout.partial and len(sized) < len(operands):
        return None
    given = (operand.form.layout.reduced for operand in operands)
    return Sharding.of(given, [layout.reduced] * results, shape)


def _convert(
    operator: Operator, tensor: Operand, dtype: torch.dtype | None = None, **kwargs: object
) -> Task | None:
    """Plans `tensor.to(dtype)`: a partial tensor stays partial if no precision is lost."""
    task = plan(operator, tensor, **kwargs)
    assert task is not None
    dtype = dtype or tensor.dtype
    floats = tensor.dtype.is_floating_point and dtype.is_floating_point
    keeps = floats and dtype.itemsize >= tensor.dtype.itemsize
    return attrs.evolve(task, linear_in=(0,) if keeps else ())


def _like(operator: Operator, tensor: Operand, *_value: object, **kwargs: object) -> Task:
    """Plans `zeros_like(x)` and similar, which read no values of `x`."""
    layout = tensor.form.layout
    rule = basic.elementwise((tensor.shape,))
    sharding = Sharding.of([layout], [layout.reduced], tensor.shape)
    return Task(rule, [tensor], orders=_orders(operator, [tensor], **kwargs), layouts=sharding)


def _empty_strided(
    operator: Operator,
    tensor: ShardedTensor,
    size: Sequence[int],
    strides: Sequence[int],
    **kwargs: object,
) -> Any:
    """Runs `x.new_empty_strided(size, strides)`, into which autograd copies a gradient of `x`.

    Its values are written later, so that it may have the layout of `x`, even if that is partial.
    """
    if tuple(size) != tuple(tensor.shape):
        return _new(operator, tensor, size, strides, **kwargs)
    order = memory_order(tuple(strides))
    part = torch.empty_permuted(tensor.part.shape, order, dtype=tensor.dtype, device=tensor.device)
    form = tensor.engine.evolved(tensor.form, strides=tuple(strides), weight=False)
    return tensor.engine.wrap(part, form)


def _new(operator: Operator, tensor: ShardedTensor, *numbers: object, **kwargs: object) -> Any:
    """Runs `x.new_zeros(shape)` and similar: a plain tensor with the dtype and device of `x`."""
    return operator(tensor.part, *numbers, **kwargs)


# Losses.

_NONE, _MEAN = 0, 1  # the numbers by which torch names a reduction; any other is a sum


def _loss(position: int) -> Planner:
    """Plans a loss; its reduction is at `position` of the arguments."""

    def compute(operator: Operator, *args: object) -> Any:
        losses = operator(*_unreduced_args(args, position))
        return losses.mean() if _reduction(args, position) == _MEAN else losses.sum()

    return _planner(position, compute)


def _loss_backward(position: int) -> Planner:
    """Plans the gradient of a loss; its reduction is at `position` of the arguments.

    torch divides the gradient of a mean by the number of elements that it sees: those of one rank.
    """

    def compute(operator: Operator, *args: object) -> torch.Tensor:
        gradient, inputs, *rest = _unreduced_args(args, position)
        if _reduction(args, position) == _MEAN:
            gradient = gradient / inputs.numel()
        of_inputs: torch.Tensor = operator(gradient.expand(inputs.shape), inputs, *rest)
        return of_inputs

    return _planner(position, compute)


def _planner(position: int, reduce: Handler) -> Planner:
    def plan_loss(operator: Operator, *args: object) -> Task | Handler | None:
        return plan(operator, *args) if _reduction(args, position) == _NONE else reduce

    return plan_loss


def _reduction(args: tuple[Any, ...], position: int) -> int:
    reduction: int = args[position] if len(args) > position else _MEAN
    return reduction


def _unreduced_args(args: tuple[object, ...], position: int) -> list[Any]:
    """Asks for no reduction; omitted arguments are None."""
    given = [*args, *[None] * (position + 1 - len(args))]
    given[position] = _NONE
    return given


PLANNERS: dict[Any, Planner] = {
    torch_private.TO_COPY: _convert,
    **by_operator(
        {
            "zeros_like ones_like empty_like full_like": _like,
            "mse_loss huber_loss smooth_l1_loss soft_margin_loss": _loss(2),
            "binary_cross_entropy": _loss(3),
            "binary_cross_entropy_with_logits": _loss(4),
            "mse_loss_backward huber_loss_backward smooth_l1_loss_backward "
            "soft_margin_loss_backward": _loss_backward(3),
            "binary_cross_entropy_backward": _loss_backward(4),
        }
    ),
}
HANDLERS: dict[Any, Handler] = by_operator(
    {"new_empty_strided": _empty_strided, "new_zeros new_ones new_empty new_full": _new}
)
