"""Operators that make each element of one element of each operand."""

import cmath
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.slices.copies import note_view
from shardcore.adapters.slices.split import as_slice, run_linear, run_split
from shardcore.adapters.slices.tensor import Slice, in_layout, without_pending
from shardcore.adapters.split_operators import Parts
from shardcore.domain import operator_rules_basic as basic

aten = torch.ops.aten

# Of a pending sum they give the pending sum, if their other operands are numbers.
LINEAR = {
    aten.clone.default,
    aten.neg.default,
    aten.mul.Scalar,
    aten.mul.Tensor,
    aten.div.Scalar,
    aten.div.Tensor,
}
# Of pending sums that lie alike they give the pending sum.
ADDING = {aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.copy_.default}

# Of two numbers, pending or whole, they give a pending one: how many conditions come before.
_SUMMING = {aten.add.Tensor: 0, aten.sub.Tensor: 0, aten.where.self: 1}
# Of a pending number and a whole one.
_SCALING = {aten.mul.Tensor, aten.div.Tensor}


def elementwise(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Split the dims of the result; operands of fewer dims or of size 1 are broadcast."""
    places = [at for at, each in enumerate(args) if isinstance(each, torch.Tensor)]
    names = [name for name, each in kwargs.items() if isinstance(each, torch.Tensor)]
    operands = [*(args[at] for at in places), *(kwargs[name] for name in names)]

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        local = list(args)
        for at, part in zip(places, parts[: len(places)], strict=True):
            local[at] = part
        named = dict(zip(names, parts[len(places) :], strict=True))
        return torch_compat.as_tuple(operator(*local, **{**kwargs, **named}))

    linear = len(operands) == 1 and operator in LINEAR and _scales(operator, args)
    return torch_compat.as_returned(operator, _results(operator, operands, call, linear))


def _scales(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether parts of a sum may be multiplied by numbers, or divided, before they are summed.

    Parts of both signs divided by zero would add up to nan, and their sum is infinite.
    """
    numbers = [each for each in args if not isinstance(each, torch.Tensor)]
    if operator in (aten.div.Scalar, aten.div.Tensor):
        return isinstance(args[0], torch.Tensor) and 0 not in numbers
    return all(map(cmath.isfinite, numbers))


def _results(
    operator: Any,
    operands: list[Any],
    call: Callable[[Parts], Sequence[torch.Tensor]],
    linear: bool,
) -> Sequence[Any]:
    alike = _run_alike(operator, operands, call) or _run_on_sums(operator, operands, call)
    if alike is not None:
        return alike
    returns = torch_compat.number_of_results(operator)
    rule = basic.elementwise(tuple(tuple(each.shape) for each in operands), returns)
    if linear:
        return run_linear(operator, rule, operands[0], lambda part: call([part]))
    return run_split(operator, rule, operands, call)


def _run_alike(
    operator: Any, operands: list[Any], call: Callable[[Parts], Sequence[torch.Tensor]]
) -> Sequence[Slice] | None:
    """On the parts as they lie, where all tensors lie alike: so does the result."""
    slices = [each for each in operands if isinstance(each, Slice)]
    plain = [each for each in operands if not isinstance(each, Slice)]
    first = slices[0]
    if any(each.ndim for each in plain) or not all(lies_alike(each, first) for each in slices):
        return None
    if first.mesh_layout.partial and (plain or operator not in ADDING or len(slices) == 1):
        return None
    parts = call([each.part if isinstance(each, Slice) else each for each in operands])
    kept = all(each.kept for each in slices)
    shape = tuple(first.shape)
    return [Slice(part, first.mesh_layout, shape, first.world, kept) for part in parts]


def _run_on_sums(
    operator: Any, operands: list[Any], call: Callable[[Parts], Sequence[torch.Tensor]]
) -> Sequence[Slice] | None:
    """On the parts of a pending number and of one that is whole, as a loss and a metric have them.

    What is whole is added by the first rank.
    """
    pending = list(filter(_is_pending, operands))
    if not pending or any(each.ndim for each in operands):
        return None
    first, *others = pending
    layout, world = first.mesh_layout, first.world
    if {op for _, op in layout.partial} != {"sum"} or any(not lies_alike(first, o) for o in others):
        return None
    chosen = _SUMMING.get(operator, len(operands))
    if len(operands) == chosen + 2 and not any(map(_is_pending, operands[:chosen])):
        summed = [in_layout(as_slice(each, world), layout) for each in operands[chosen:]]
        tensors = [*operands[:chosen], *summed]
    elif len(operands) == 2 and operator in _SCALING and not others and first is operands[0]:
        tensors = operands
    else:
        return None
    parts = call([each.part if isinstance(each, Slice) else each for each in tensors])
    return [Slice(part, layout, (), world) for part in parts]


def _is_pending(operand: Any) -> bool:
    return isinstance(operand, Slice) and operand.is_pending


def lies_alike(one: Slice, other: Slice) -> bool:
    """Whether parts of both hold the same places of the whole."""
    return one.shape == other.shape and one.mesh_layout == other.mesh_layout


def _same(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What changes nothing of the value: `detach` and its kind."""
    (tensor,) = args
    part = operator(tensor.part, **kwargs)
    shape, strides = tuple(tensor.shape), tensor.stride()
    layout, world, memory = tensor.mesh_layout, tensor.world, tensor.memory
    same = Slice(part, layout, shape, world, tensor.kept, strides, memory)
    note_view(same, tensor, lambda whole: whole, is_copy=tensor.is_pending)
    return same


def _converted(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_to_copy(tensor, dtype=...)`: with as much precision, what is pending may stay so."""
    (tensor,) = args
    dtype = kwargs.get("dtype") or tensor.dtype
    floats = tensor.is_floating_point() and dtype.is_floating_point
    if not tensor.mesh_layout.partial or (floats and dtype.itemsize >= tensor.dtype.itemsize):
        part = operator(tensor.part, **kwargs)
        return Slice(part, tensor.mesh_layout, tuple(tensor.shape), tensor.world, tensor.kept)
    return elementwise(operator, args, kwargs)


def _like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`zeros_like(x)` and its kind: no values of `x` are read."""
    tensor, *numbers = args
    part = operator(tensor.part, *numbers, **kwargs)
    return Slice(part, without_pending(tensor.mesh_layout), tuple(tensor.shape), tensor.world)


def _empty_strided(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.new_empty_strided(size, strides)`: where autograd copies a gradient of the size of `x` to.

    Its values are still to be written, so that it may lie as `x` does, sums pending too.
    """
    tensor, size, strides = args
    if tuple(size) != tuple(tensor.shape):
        return _new(operator, args, kwargs)
    order = sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim))
    part = torch.empty_permuted(tensor.part.shape, order, dtype=tensor.dtype, device=tensor.device)
    shape = tuple(tensor.shape)
    return Slice(part, tensor.mesh_layout, shape, tensor.world, strides=tuple(strides))


def _new(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.new_zeros(shape)` and its kind: only the kind of tensor is taken from `x`."""
    tensor, *numbers = args
    return operator(tensor.part, *numbers, **kwargs)


# torch 2.13 does not tag them as such.
_ELEMENTWISE = (
    aten.elu_backward.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.leaky_relu_backward.default,
    aten.softplus_backward.default,
)

HANDLERS: dict[Any, torch_compat.Handler] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.lift_fresh.default), _same),
    aten.clone.default: elementwise,
    torch_compat.TO_COPY: _converted,
    **dict.fromkeys(
        (
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.empty_like.default,
            aten.full_like.default,
        ),
        _like,
    ),
    aten.new_empty_strided.default: _empty_strided,
    **dict.fromkeys(
        (
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.new_empty.default,
            aten.new_full.default,
        ),
        _new,
    ),
}
