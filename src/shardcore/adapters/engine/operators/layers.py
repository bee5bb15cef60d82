"""Operators of layers: convolutions, pads, indexing, upsampling."""

from collections.abc import Sequence
from math import prod
from typing import Any

import attrs
import torch

from shardcore.adapters.engine.operators import slicing
from shardcore.adapters.engine.operators.views import along
from shardcore.adapters.engine.task import (
    Handler,
    Operand,
    Parts,
    Planner,
    Task,
    by_operator,
    dims_of_plane,
    order_of,
)
from shardcore.adapters.torch_private import unnamed_operators
from shardcore.adapters.torch_private.operators import Operator
from shardcore.domain.engine.rules import basic, layers, lookups


def _convolution(
    operator: Operator, inputs: Operand, kernel: Operand, bias: Operand | None, *numbers: Any
) -> Task:
    """Plans a convolution by stride, padding, dilation, transposed, output_padding, groups."""
    *how, groups = numbers
    channels = layers.Channels.of(kernel.shape, groups, how[3])
    rule = layers.convolution(channels, inputs.ndim - 2, bias is not None)

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        x, weight, *added = parts
        local_bias = added[0] if added else None
        return (operator(x, weight, local_bias, *how, _groups(channels, x)),)

    operands = [operand for operand in (inputs, kernel, bias) if operand is not None]
    # The cost of a partial sum: as many elements as the output has at a stride of one.
    size = (inputs.shape[0], groups * channels.per_output, *inputs.shape[2:])
    return Task(rule, operands, call, (size,), orders=[order_of(inputs)])


def _convolution_backward(
    operator: Operator,
    gradient: Operand,
    inputs: Operand,
    kernel: Operand,
    biases: object,
    *numbers: Any,
) -> Task:
    """Plans the gradient of a convolution; `numbers` are its numbers, and the mask of gradients."""
    *how, groups, mask = numbers
    channels = layers.Channels.of(kernel.shape, groups, how[3])

    def call(parts: Parts) -> Sequence[torch.Tensor | None]:
        grad, x, weight = parts
        if len(weight) == 1:
            # On one thread, torch refuses the strides of Keras' kernels here if x is one image:
            # the rows of a rank where one device has more.
            weight = weight.contiguous()
        sizes = None if biases is None else [grad.shape[1]]
        gradients: Sequence[torch.Tensor | None] = operator(
            grad, x, weight, sizes, *how, _groups(channels, x), mask
        )
        return gradients

    shapes = tuple(inputs.shape), tuple(kernel.shape), (gradient.shape[1],)
    sums = tuple(shape if wanted else (0,) for shape, wanted in zip(shapes, mask, strict=True))
    rule = layers.convolution_backward(channels, inputs.ndim - 2)
    return Task(rule, (gradient, inputs, kernel), call, sums, orders=[order_of(inputs)])


def _groups(channels: layers.Channels, part: torch.Tensor) -> int:
    return 1 if channels.groups == 1 else part.shape[1] // channels.per_input


def _planes(operator: Operator, tensor: Operand, *rest: object) -> Task:
    return _in_order(_contiguous_planes(operator, tensor, *rest))


def _contiguous_planes(operator: Operator, tensor: Operand, *rest: object) -> Task:
    """Plans an operator on planes with contiguous results, as torch returns them.

    The gradient of `adaptive_max_pool3d` reads the indices of the maxima in memory order: in
    another order they would belong to other windows.
    """
    plane = range(tensor.ndim - dims_of_plane(operator), tensor.ndim)
    return along(operator, (tensor, *rest), frozenset(plane))


def _constant_pad(
    operator: Operator, tensor: Operand, pads: Sequence[int], value: float = 0
) -> Task | Handler:
    """Plans a pad; there are two pads a dim, the last dim first.

    If each pad cuts off, as in the gradient of a pad, a partial sum stays partial: it is smaller.
    """
    shift = None if order_of(tensor) else slicing.of_pads(tensor, pads, value)
    if shift is not None:
        return shift.pad
    padded = (tensor.ndim - 1 - at // 2 for at, pad in enumerate(pads) if pad)
    task = _in_order(along(operator, [tensor], frozenset(padded)))
    return attrs.evolve(task, linear_in=(0,) if all(pad <= 0 for pad in pads) else ())


def _in_order(task: Task) -> Task:
    """Gives the results of `task` the memory order of its first operand."""
    return attrs.evolve(task, orders=[order_of(task.operands[0])] * len(task.rule.results))


def _index_put(
    _operator: Operator,
    tensor: Operand,
    indices: Sequence[Any],
    values: Operand,
    accumulates: bool = False,
) -> Task | None:
    """Plans `index_put` if each index is a row of numbers, neither a mask nor broadcast."""
    if not _are_rows(tensor, indices, values):
        return None
    rule = lookups.index_put(tensor.ndim, len(indices), accumulates)
    return Task(rule, (tensor, *indices, values), result_shapes=(tensor.shape,))


def _are_rows(tensor: Operand, indices: Sequence[Any], values: Operand) -> bool:
    """Checks that the first dims have indices with as many numbers as there are values."""
    shape = (values.shape[0] if values.ndim else 0, *tensor.shape[len(indices) :])
    return values.shape == shape and all(
        index is not None
        and index.shape == shape[:1]
        and index.dtype not in (torch.bool, torch.uint8)
        for index in indices
    )


def _index(_operator: Operator, tensor: Operand, indices: Sequence[Any]) -> Task | None:
    """Plans `index` if adjacent dims have indices of numbers of one shape."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    given = [indices[dim] for dim in dims]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    numbers = all(index.dtype not in (torch.bool, torch.uint8) for index in given)
    if not adjacent or not numbers or len({index.shape for index in given}) > 1:
        return None
    return Task(lookups.index(tensor.ndim, dims[0], len(dims), given[0].ndim), (tensor, *given))


def _im2col(_operator: Operator, images: Operand, window: Sequence[int], *_numbers: object) -> Task:
    return Task(layers.im2col(images.ndim == 4, prod(window)), (images,))


def _col2im(
    _operator: Operator, columns: Operand, _size: object, window: Sequence[int], *_numbers: object
) -> Task:
    return Task(layers.col2im(columns.ndim == 3, prod(window)), (columns,))


def _upsample_backward(
    operator: Operator,
    gradient: Operand,
    output_size: Sequence[int],
    input_size: Sequence[int],
    *rest: object,
) -> Task:
    ndim, spatial = gradient.ndim, dims_of_plane(operator)

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        (part,) = parts
        local = [*part.shape[:-spatial], *input_size[-spatial:]]
        return (operator(part, output_size, local, *rest),)

    rule = basic.along(ndim, frozenset(range(ndim - spatial, ndim)))
    return Task(rule, [gradient], call, orders=[order_of(gradient)])


# All tensors of such an operator have the same dims.
_OF_PLANES = (
    "reflection_pad1d reflection_pad2d reflection_pad3d "
    "replication_pad1d replication_pad2d replication_pad3d adaptive_max_pool2d"
)
_UPSAMPLES = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d"
)


def _backward(names: str) -> str:
    return " ".join(f"{name}_backward" for name in names.split())


PLANNERS: dict[Any, Planner] = {
    **dict.fromkeys(unnamed_operators.ADAPTIVE_AVERAGES, _planes),
    **by_operator(
        {
            f"{_OF_PLANES} {_backward(_OF_PLANES)} {_UPSAMPLES}": _planes,
            _backward(_UPSAMPLES): _upsample_backward,
            "adaptive_max_pool3d adaptive_max_pool3d_backward": _contiguous_planes,
            "convolution": _convolution,
            "convolution_backward": _convolution_backward,
            "constant_pad_nd": _constant_pad,
            "index.Tensor": _index,
            "index_put": _index_put,
            "im2col": _im2col,
            "col2im": _col2im,
        }
    ),
}
