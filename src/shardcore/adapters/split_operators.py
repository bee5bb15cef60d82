"""Operators of layers, split by the rules of `domain.operator_rules_table`.

They are the same for every library of sharded tensors, which brings its own `run_split`: it moves
the operands to where a rule wants them, and makes sharded tensors of the parts of the results.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Protocol

import torch

from shardcore.adapters import torch_compat
from shardcore.domain import operator_rules_table as table
from shardcore.domain.operator_rules import OperatorRule

aten = torch.ops.aten

Parts = Sequence[torch.Tensor]
Shapes = tuple[tuple[int, ...], ...]


class RunSplit(Protocol):
    """Runs an operator on this rank's parts, as a rule says."""

    def __call__(
        self,
        operator: Any,
        rule: OperatorRule,
        operands: Sequence[torch.Tensor],
        call: Callable[[Parts], Sequence[torch.Tensor | None]],
        result_shapes: Shapes = (),
    ) -> Sequence[Any]:
        """Split `operator` by `rule`.

        Args:
            operator: The ATen operator, which is told if it has to run whole.
            rule: Its rule.
            operands: Its tensors, as many as the rule has; plain ones count as replicated.
            call: Runs it on this rank's parts; gives this rank's parts of the results.
            result_shapes: The global shapes of the results, where sums may be left pending.

        Returns:
            The results, None where `call` gives None.
        """
        ...


def _convolution(
    run: RunSplit, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`convolution(input, kernel, bias, ..., transposed, output_padding, groups)`."""
    inputs, kernel, bias, *numbers, groups = args
    channels = _channels(kernel, groups, transposed=numbers[3])
    rule = table.convolution(channels, inputs.ndim - 2, bias is not None)

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        x, weight, *added = parts
        local_bias = added[0] if added else None
        return (operator(x, weight, local_bias, *numbers, _groups(channels, x), **kwargs),)

    operands = [each for each in (inputs, kernel, bias) if each is not None]
    # What a pending sum costs: as many elements as the output has at a stride of one.
    size = (inputs.shape[0], groups * channels.per_output, *inputs.shape[2:])
    return run(operator, rule, operands, call, (size,))[0]


def _convolution_backward(
    run: RunSplit, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`convolution_backward(gradient, input, kernel, bias_sizes, ..., groups, output_mask)`."""
    gradient, inputs, kernel, bias_sizes, *numbers, groups, mask = args
    channels = _channels(kernel, groups, transposed=numbers[3])

    def call(parts: Parts) -> Sequence[torch.Tensor | None]:
        grad, x, weight = parts
        sizes = None if bias_sizes is None else [grad.shape[1]]
        found: Sequence[torch.Tensor | None] = operator(
            grad, x, weight, sizes, *numbers, _groups(channels, x), mask, **kwargs
        )
        return found

    shapes = tuple(inputs.shape), tuple(kernel.shape), (gradient.shape[1],)
    sums = tuple(shape if wanted else (0,) for shape, wanted in zip(shapes, mask, strict=True))
    rule = table.convolution_backward(channels, inputs.ndim - 2)
    return run(operator, rule, (gradient, inputs, kernel), call, sums)


def _channels(kernel: torch.Tensor, groups: int, *, transposed: bool) -> table.Channels:
    first, second = kernel.shape[:2]
    if transposed:
        return table.Channels(groups, first // groups, second, transposed=True)
    return table.Channels(groups, second, first // groups, transposed=False)


def _groups(channels: table.Channels, part: torch.Tensor) -> int:
    """The groups of this rank's part of the input."""
    return 1 if channels.groups == 1 else part.shape[1] // channels.per_input


def _planes(
    spatial: int, run: RunSplit, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What works on each plane of the last `spatial` dims alone."""
    ndim = args[0].ndim
    return _along(run, operator, args, kwargs, frozenset(range(ndim - spatial, ndim)))


def _constant_pad(
    run: RunSplit, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`constant_pad_nd(input, pads, value)`: two pads a dim, the last dim first."""
    tensor, pads = args[:2]
    padded = (tensor.ndim - 1 - at // 2 for at, pad in enumerate(pads) if pad)
    return _along(run, operator, args, kwargs, frozenset(padded))


def _along(
    run: RunSplit,
    operator: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    whole: frozenset[int],
) -> Any:
    """An operator along the dims in `whole`; all its tensors have the same dims."""
    places = [at for at, each in enumerate(args) if isinstance(each, torch.Tensor)]
    returns = torch_compat.number_of_results(operator)

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        local = list(args)
        for at, part in zip(places, parts, strict=True):
            local[at] = part
        found = operator(*local, **kwargs)
        return (found,) if returns == 1 else tuple(found)

    rule = table.along(args[places[0]].ndim, whole, len(places), returns)
    results = run(operator, rule, [args[at] for at in places], call)
    return results[0] if returns == 1 else results


def _index_put(run: RunSplit, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`index_put(tensor, indices, values, accumulate)`: split where each index is a row of numbers.

    Other indices, masks and such as are broadcast, are not split.
    """
    tensor, indices, values, *rest = args
    accumulates = bool(rest[0] if rest else kwargs.get("accumulate", False))
    given = [each for each in indices if each is not None]
    operands = (tensor, *given, values)

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        local, *numbers, put = parts
        of_dims = iter(numbers)
        found = [None if each is None else next(of_dims) for each in indices]
        return (operator(local, found, put, accumulates),)

    if _are_rows(tensor, indices, values):
        rule = table.index_put(tensor.ndim, len(indices), accumulates)
    else:
        rule = table.whole(tuple(each.ndim for each in operands), tensor.ndim)
    return run(operator, rule, operands, call, (tuple(tensor.shape),))[0]


def _are_rows(tensor: torch.Tensor, indices: Sequence[Any], values: torch.Tensor) -> bool:
    """Whether the first dims have an index of as many numbers as there are values for."""
    shape = (values.shape[0] if values.ndim else 0, *tensor.shape[len(indices) :])
    return tuple(values.shape) == shape and all(
        each is not None
        and tuple(each.shape) == shape[:1]
        and each.dtype not in (torch.bool, torch.uint8)
        for each in indices
    )


def _im2col(run: RunSplit, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`im2col(images, window, ...)`."""
    images, window, *numbers = args
    rule = table.im2col(images.ndim == 4, prod(window))
    return run(
        operator, rule, (images,), lambda parts: (operator(*parts, window, *numbers, **kwargs),)
    )[0]


def _col2im(run: RunSplit, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`col2im(columns, size, window, ...)`."""
    columns, *numbers = args
    rule = table.col2im(columns.ndim == 3, prod(numbers[1]))
    return run(operator, rule, (columns,), lambda parts: (operator(*parts, *numbers, **kwargs),))[0]


def _attention(run: RunSplit, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """CPU flash attention: query, key, value, then numbers; the mask is in `kwargs`."""
    operands, numbers = args[:3], args[3:]
    heads, mask, dims = _heads(operands, kwargs)

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        local, named = _with_mask(parts, 3, kwargs)
        found: Sequence[torch.Tensor] = operator(*local, *numbers, **named)
        return found

    return run(operator, table.attention(heads, dims), (*operands, *mask), call)


def _attention_backward(
    run: RunSplit, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The gradient, query, key, value, the output and its sums; then as `_attention`."""
    operands, numbers = args[:6], args[6:]
    heads, mask, dims = _heads(operands[1:4], kwargs)

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        local, named = _with_mask(parts, 6, kwargs)
        found: Sequence[torch.Tensor] = operator(*local, *numbers, **named)
        return found

    return run(operator, table.attention_backward(heads, dims), (*operands, *mask), call)


def _heads(
    operands: Sequence[torch.Tensor], kwargs: dict[str, Any]
) -> tuple[str, list[torch.Tensor], str | None]:
    """The first two dims of query, key and value as text; the mask, if any; its first two dims.

    A mask of (length, length) is one over no batch and no heads.
    """
    sizes = operands[0].shape[:2]
    heads = [
        letter if len({operand.shape[dim] for operand in operands}) == 1 else "-"
        for dim, letter in enumerate("bh")
    ]
    given = kwargs.get("attn_mask")
    if given is None:
        return " ".join(heads), [], None
    mask = given[(None,) * (4 - given.ndim)]
    dims = [heads[dim] if mask.shape[dim] == sizes[dim] else "-" for dim in range(2)]
    return " ".join(heads), [mask], " ".join(dims)


def _with_mask(parts: Parts, count: int, kwargs: dict[str, Any]) -> tuple[Parts, dict[str, Any]]:
    """The first `count` parts, and `kwargs` with the mask's part if there is one."""
    named = kwargs | ({"attn_mask": parts[count]} if len(parts) > count else {})
    return parts[:count], named


# Operators on planes of one, two and three dims; all their tensors have the same dims.
PLANES = {
    0: (
        aten.hardshrink.default,
        aten.hardshrink_backward.default,
        aten.hardsigmoid.default,
        aten.hardsigmoid_backward.default,
        aten.hardswish.default,
        aten.hardswish_backward.default,
        aten.hardtanh.default,
        aten.hardtanh_backward.default,
        aten.softshrink.default,
        aten.softshrink_backward.default,
    ),
    1: (
        aten.reflection_pad1d.default,
        aten.reflection_pad1d_backward.default,
        aten.replication_pad1d.default,
        aten.replication_pad1d_backward.default,
    ),
    2: (
        aten.adaptive_max_pool2d.default,
        aten.adaptive_max_pool2d_backward.default,
        aten.avg_pool2d.default,
        aten.avg_pool2d_backward.default,
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.reflection_pad2d.default,
        aten.reflection_pad2d_backward.default,
        aten.replication_pad2d.default,
        aten.replication_pad2d_backward.default,
    ),
    3: (
        aten.adaptive_max_pool3d.default,
        aten.adaptive_max_pool3d_backward.default,
        aten.avg_pool3d.default,
        aten.avg_pool3d_backward.default,
        aten.max_pool3d_with_indices.default,
        aten.max_pool3d_with_indices_backward.default,
        aten.reflection_pad3d.default,
        aten.reflection_pad3d_backward.default,
        aten.replication_pad3d.default,
        aten.replication_pad3d_backward.default,
    ),
}

_SPLIT: dict[Any, Callable[..., Any]] = {
    **{
        each: partial(_planes, spatial)
        for table_of in (PLANES, torch_compat.ADAPTIVE_AVERAGES)
        for spatial, operators in table_of.items()
        for each in operators
    },
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.constant_pad_nd.default: _constant_pad,
    aten.index_put.default: _index_put,
    aten.im2col.default: _im2col,
    aten.col2im.default: _col2im,
    torch_compat.CPU_ATTENTION: _attention,
    torch_compat.CPU_ATTENTION_BACKWARD: _attention_backward,
}


def handlers(run: RunSplit) -> dict[Any, torch_compat.Handler]:
    """What a library does with the operators, given how it runs one that is split."""
    return {operator: partial(handle, run) for operator, handle in _SPLIT.items()}
