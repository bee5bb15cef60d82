"""Patches of functions: draws, `remat`, `scatter`, `repeat`, images, powers, a loss, `einsum`."""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import keras
import torch
from torch.utils.checkpoint import checkpoint

from shardcore.binding import keras_private
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.types import Original, Seed
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.placements import Shard
from shardcore.ports.capture import StepCapture
from shardcore.ports.types import Array

# The operands of a recorded draw: no sharded tensor, and no array of NumPy.
_RECORDABLE = (torch.Tensor, torch.Size, torch.dtype, bool, int, float, str, type(None))


@replaces(
    "keras.src.backend.torch.random:torch_seed_generator",
    reason="Reads the seed on the host, where a trace of the step does not see it.",
    everywhere=True,
)
def generator(
    sessions: Sessions, capture: StepCapture[torch.Tensor], original: Original, seed: Seed
) -> Any:
    """Replaces `torch_seed_generator` in a step that is being recorded; a generator stays one."""
    if isinstance(seed, torch.Generator):
        return seed
    if not capture.is_recording() or keras_private.is_symbolic():
        return original(seed)
    return capture.generator(_next_seed(seed, sessions))


@replaces(
    "keras.src.backend.torch.random:beta",
    "keras.src.backend.torch.random:binomial",
    "keras.src.backend.torch.random:gamma",
    reason="Sets torch's own generator by a number, where a trace does not see it.",
)
def draw(
    sessions: Sessions,
    capture: StepCapture[torch.Tensor],
    original: Original,
    *args: object,
    **kwargs: object,
) -> Any:
    """Replaces `beta`, `binomial` and `gamma` in a step that is being recorded.

    They set the generators of all devices, and restore only that of the CPU.
    """
    operands = inspect.signature(original).bind(*args, **kwargs).arguments
    seed = operands.pop("seed", None)
    recordable = all(type(operand) in _RECORDABLE for operand in keras_private.leaves(operands))
    alone = not torch.cuda.is_available() and recordable
    if not capture.is_recording() or keras_private.is_symbolic() or not alone:
        return original(*args, **kwargs)
    return capture.drawn(original, _next_seed(seed, sessions), operands)


def _next_seed(seed: Seed, sessions: Sessions) -> Any:
    """Adds up the two numbers of Keras' next seed: torch takes one."""
    first, second = keras_private.draw_seed(seed)
    total = first + second
    strategy = sessions.strategy_of_tensor(total)
    return total if strategy is None else strategy.full_tensor(total)


@replaces(
    "keras.src.backend.torch.core:remat",
    reason="Sets torch's own generators to recompute a layer, where a trace does not see it.",
)
def remat(
    capture: StepCapture[torch.Tensor], original: Original, function: Callable[..., object]
) -> Callable[..., Any]:
    """Replaces `remat` in a step that is being recorded: torch sets its generators unseen there."""
    recomputed = original(function)

    def call(*args: object, **kwargs: object) -> Any:
        if not capture.is_recording() or keras_private.is_symbolic():
            return recomputed(*args, **kwargs)
        return checkpoint(
            partial(function, **kwargs),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=capture.recomputation,
        )

    return call


@replaces(
    "keras.src.backend.torch.core:scatter",
    reason="Adds value by value, each at an index that is read on the host.",
)
def scatter(original: Original, indices: Any, values: Array, shape: Sequence[int]) -> Any:
    """Replaces `scatter` by one call: Keras adds each value by an index from the host."""
    indices = keras.ops.convert_to_tensor(indices)
    if indices.is_floating_point() or indices.dtype is torch.bool:
        return original(indices, values, shape)
    return _add_at(indices.long(), keras.ops.convert_to_tensor(values), tuple(shape))


@replaces(
    "keras.src.backend.torch.math:_segment_reduction_fn",
    reason="Repeats numbers by a tensor: without values, as in a plan, their count is unknown.",
)
def segment_reduction(
    sessions: Sessions,
    original: Original,
    data: torch.Tensor,
    segment_ids: torch.Tensor,
    reduction_method: str,
    num_segments: int | None = None,
    *options: object,
) -> Any:
    """Replaces what `segment_sum` and its like call, if the number of segments is known.

    Over several ranks each adds up its rows.
    """
    if keras_private.is_symbolic() or not isinstance(num_segments, int):
        return original(data, segment_ids, reduction_method, num_segments, *options)
    is_known = (segment_ids >= 0) & (segment_ids < num_segments)
    # One more segment gets the rows whose segment is out of range.
    places = segment_ids.long().where(is_known, num_segments)
    shape = num_segments + 1, *data.shape[1:]
    if reduction_method == "sum" and sessions.current() is not None:
        precise = data.float() if data.dtype in (torch.float16, torch.bfloat16) else data
        return _add_at(places.unsqueeze(1), precise, shape)[:-1].to(data.dtype)
    first = torch.full(shape, _FIRST[reduction_method], device=keras_private.torch_device())
    index = places.reshape(-1, *[1] * (data.ndim - 1)).expand(data.shape)
    reduced = first.scatter_reduce(0, index, data.float(), reduction_method)
    return reduced[:-1].to(data.dtype)


# The result for a segment without rows, as in Keras.
_FIRST = MappingProxyType({"sum": 0.0, "prod": 1.0, "amax": -math.inf, "amin": math.inf})


@replaces(
    "keras.src.backend.torch.nn:_transpose_spatial_inputs",
    reason="Copies images to have their channels first, before each convolution and pooling.",
)
def with_channels_first(original: Original, images: Any, **options: object) -> Any:
    """Replaces `_transpose_spatial_inputs`: images keep their memory, with the channels innermost.

    torch convolves and pools them so, and Keras (3.15) copies images for a convolution back.
    """
    is_image = isinstance(images, torch.Tensor) and images.ndim == 4
    return images.permute(0, 3, 1, 2) if is_image else original(images, **options)


@replaces(
    "keras.src.backend.torch.numpy:power",
    reason="Makes a tensor of a number: a power by logarithms, and a gradient of six operators.",
)
def power(original: Original, x: object, exponent: object) -> Any:
    """Replaces `power`: torch squares a tensor for the exponent 2, as in the norm of a Llama."""
    if not isinstance(x, torch.Tensor) or not isinstance(exponent, int | float):
        return original(x, exponent)
    # Of a tensor without dims Keras makes the type of the exponent.
    return torch.pow(x, exponent) if x.is_floating_point() and x.ndim else original(x, exponent)


def _add_at(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Sums `values` at each of `indices`; the rest is zero.

    torch 2.13 adds `float32` on a CPU in several threads, in any order: ranks would differ in the
    last bits. In `float64` it does not.
    """
    length = indices.shape[-1]
    numbers = indices.reshape(-1, length).unbind(-1)
    rows = values.reshape(-1, *shape[length:])
    is_unordered = values.dtype is torch.float32 and values.device.type == "cpu"
    in_turn = torch.float64 if is_unordered else values.dtype
    zeros = torch.zeros(shape, dtype=in_turn, device=keras_private.torch_device())
    return torch.index_put(zeros, numbers, rows.to(in_turn), accumulate=True).to(values.dtype)


@replaces(
    "keras.src.backend.torch.numpy:repeat",
    reason="Looks up each element by its index, which moves the heads of grouped attention.",
    until=(3, 14),
)
def repeat(
    _session: Session, original: Original, x: object, repeats: object, axis: int | None = None
) -> Any:
    """Replaces `repeat` of Keras 3.13 and 3.14: by one number it is a reshape, on any shard."""
    if keras_private.is_symbolic() or not isinstance(repeats, int):
        return original(x, repeats, axis)
    return torch.repeat_interleave(keras.ops.convert_to_tensor(x), repeats, dim=axis)


@replaces(
    "keras.src.backend.torch.nn:sparse_categorical_crossentropy",
    reason=("Moves the classes of sequences to dim 1: all logits are copied, and their gradient."),
)
def sparse_crossentropy(
    sessions: Sessions,
    original: Original,
    target: Any,
    output: Any,
    from_logits: bool = False,
    axis: int = -1,
) -> Any:
    """Replaces `sparse_categorical_crossentropy`: flattens (batch, time) to one dim.

    Keras moves the classes to dim 1, as `torch.nn.functional.cross_entropy` has them: torch copies
    all logits and their gradient, and sums over a dim that is not the last. Flattened logits are
    not copied. The sum is rounded differently (ADR 21).
    """
    if sessions.are_served():
        target, output = map(keras.ops.convert_to_tensor, (target, output))
        if _can_be_rows(target, output, axis, sessions.current()):
            rows = output.reshape(-1, output.shape[-1])
            losses = original(target.reshape(-1), rows, from_logits=from_logits)
            return losses.reshape(output.shape[:-1])
    return original(target, output, from_logits=from_logits, axis=axis)


def _can_be_rows(
    target: torch.Tensor, output: torch.Tensor, axis: int, session: Session | None
) -> bool:
    samples = output.shape[:-1]
    return (
        len(samples) > 1
        and axis in (-1, len(samples))
        and tuple(target.shape) in (tuple(samples), (*samples, 1))
        and all(_has_full_rows(tensor, session) for tensor in (target, output))
    )


def _has_full_rows(tensor: torch.Tensor, session: Session | None) -> bool:
    """Tells whether ranks have equal numbers of rows of `tensor`, and no other dim is sharded."""
    layout = None if session is None else session.strategy.layout(tensor)
    if layout is None:
        return True
    of_rows = Layout(layout.mesh, (layout.spec[0], *[None] * (tensor.ndim - 1)))
    ranks = math.prod(map(layout.mesh.axis_size, layout.dim_axes(0)))
    return layout == of_rows and tensor.shape[0] % ranks == 0


@replaces(
    "keras.src.backend.torch.numpy:einsum",
    reason="Makes one matrix of the kernels of all experts, which would be all-gathered.",
)
def einsum(
    session: Session, original: Original, subscripts: str, *operands: Array, **kwargs: object
) -> Any:
    """Replaces `einsum` of tokens and kernels of experts.

    torch makes one matrix of the kernels of all experts for `td,edh->eth`. If an axis shards tokens
    and experts, that matrix would be all-gathered, as any weight. A product for each expert, with
    equal tokens, lets the planner all-gather the tokens instead (ADR 44).
    """
    if len(operands) == 2 and _makes_experts(subscripts):
        subscripts, tokens = _add_expert_dim(subscripts, *operands, session)
        operands = (tokens, operands[1])
    return original(subscripts, *operands, **kwargs)


def _makes_experts(subscripts: str) -> bool:
    """Tells whether the first dim of the second operand is new, and the first of the result.

    Example:
        >>> _makes_experts("td,edh->eth"), _makes_experts("etd,edh->eth")
        (True, False)
    """
    operands, _, result = subscripts.replace(" ", "").partition("->")
    first, _, second = operands.partition(",")
    expert = second[:1]
    return expert.isalpha() and expert not in first and expert == result[:1]


def _add_expert_dim(subscripts: str, tokens: Any, kernel: Any, session: Session) -> tuple[str, Any]:
    """Adds a dim for experts to subscripts and tokens, if an axis shards tokens and experts.

    The tokens of all experts are one tensor in memory.
    """
    operands = tokens, getattr(kernel, "value", kernel)
    if not all(isinstance(operand, torch.Tensor) for operand in operands):
        return subscripts, tokens
    of_tokens, of_kernel = map(session.strategy.layout, operands)
    if of_tokens is None or of_kernel is None:
        return subscripts, tokens
    if not any(isinstance(of_tokens.placement(axis), Shard) for axis in of_kernel.dim_axes(0)):
        return subscripts, tokens
    joined = subscripts.replace(" ", "")
    expert = joined.partition(",")[2][0]
    return expert + joined, tokens.expand(kernel.shape[0], *tokens.shape)
