"""Patches of draws, `remat`, `scatter`, `repeat`, images, sparse cross entropy, optimizers."""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import keras
import torch
from torch.optim.adam import adam
from torch.utils.checkpoint import checkpoint

from shardcore.binding import keras_private
from shardcore.binding.context.session import Session, Sessions
from shardcore.binding.types import Original, Seed
from shardcore.domain.layout import Layout
from shardcore.ports.capture import StepCapture
from shardcore.ports.types import Array

# The operands of a recorded draw: no sharded tensor, and no array of NumPy.
_RECORDABLE = (torch.Tensor, torch.Size, torch.dtype, bool, int, float, str, type(None))


def generator(
    sessions: Sessions, capture: StepCapture[torch.Tensor], original: Original, seed: Seed
) -> Any:
    """Replaces `torch_seed_generator` in a step that is being recorded; a generator stays one."""
    if isinstance(seed, torch.Generator):
        return seed
    if not capture.is_recording() or keras_private.is_symbolic():
        return original(seed)
    return capture.generator(_next_seed(seed, sessions))


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
    """Returns the next seed of `seed`, as a plain tensor of one number."""
    first, second = keras_private.draw_seed(seed)
    total = first + second
    strategy = sessions.strategy_of_tensor(total)
    return total if strategy is None else strategy.full_tensor(total)


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


def scatter(original: Original, indices: Any, values: Array, shape: Sequence[int]) -> Any:
    """Replaces `scatter` by one call: Keras adds each value by an index from the host."""
    indices = keras.ops.convert_to_tensor(indices)
    if indices.is_floating_point() or indices.dtype is torch.bool:
        return original(indices, values, shape)
    return _add_at(indices.long(), keras.ops.convert_to_tensor(values), tuple(shape))


def segment_sum(
    _session: Session,
    original: Original,
    data: object,
    segment_ids: object,
    num_segments: int | None = None,
    **options: object,
) -> Any:
    """Replaces `segment_sum` of a known number of segments: each rank adds up its rows."""
    if keras_private.is_symbolic() or not isinstance(num_segments, int):
        return original(data, segment_ids, num_segments, **options)
    rows, numbers = map(keras.ops.convert_to_tensor, (data, segment_ids))
    is_known = (numbers >= 0) & (numbers < num_segments)
    # One more segment gets the rows whose segment is out of range.
    places = numbers.long().where(is_known, num_segments).unsqueeze(1)
    precise = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    sums = _add_at(places, precise, (num_segments + 1, *rows.shape[1:]))
    return sums[:-1].to(rows.dtype)


def with_channels_first(original: Original, images: Any, **options: object) -> Any:
    """Replaces `_transpose_spatial_inputs`: images keep their memory, with the channels innermost.

    torch convolves and pools them so, and Keras (3.15) copies images for a convolution back.
    """
    is_image = isinstance(images, torch.Tensor) and images.ndim == 4
    return images.permute(0, 3, 1, 2) if is_image else original(images, **options)


def _add_at(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the sum of `values` at each of `indices`, zero elsewhere.

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


def repeat(
    _session: Session, original: Original, x: object, repeats: object, axis: int | None = None
) -> Any:
    """Replaces `repeat` of Keras 3.13 and 3.14: by one number it is a reshape, on any shard."""
    if keras_private.is_symbolic() or not isinstance(repeats, int):
        return original(x, repeats, axis)
    return torch.repeat_interleave(keras.ops.convert_to_tensor(x), repeats, dim=axis)


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
    not copied. The sum is rounded differently.
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
    """Returns whether ranks have equal numbers of rows of `tensor`, and no other dim is sharded."""
    layout = None if session is None else session.strategy.layout(tensor)
    if layout is None:
        return True
    of_rows = Layout(layout.mesh, (layout.spec[0], *[None] * (tensor.ndim - 1)))
    ranks = math.prod(map(layout.mesh.axis_size, layout.dim_axes(0)))
    return layout == of_rows and tensor.shape[0] % ranks == 0


def fused_update(
    sessions: Sessions,
    original: Original,
    optimizer: keras.optimizers.Adam,
    grads: list[torch.Tensor],
    variables: list[keras.Variable],
    learning_rate: torch.Tensor | float,
) -> None:
    """Replaces `Adam._parallel_update_step` by torch's fused update, one pass over all tensors.

    It ignores strides, so all must be contiguous. The moments of a variable must have its layout; a
    strategy may shard them further. A compiled step keeps the operators of Keras, which Inductor
    fuses; it has no code for the fused update.
    """
    values = [variable.value for variable in variables]
    moments = keras_private.moments_of(optimizer, variables)
    run, fits = sessions.run(), _have_one_layout(sessions, values, moments)
    is_compiled = run is not None and run.trainer.jit_compile is True
    if not sessions.are_served() or is_compiled or not fits:
        original(optimizer, grads, variables, learning_rate)
        return
    # At an infinite step torch applies no bias correction: Keras has it in the learning rate.
    endless = torch.full((), torch.inf, device=values[0].device)
    first, second, largest = moments
    adam(
        values,
        [grad if grad.is_contiguous() else grad.contiguous() for grad in grads],
        first,
        second,
        largest,
        [endless] * len(values),
        fused=True,
        amsgrad=optimizer.amsgrad,
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        lr=_corrected_rate(optimizer, learning_rate, values[0].dtype),
        weight_decay=0.0,
        eps=optimizer.epsilon,
        maximize=False,
    )


def _have_one_layout(
    sessions: Sessions, values: list[torch.Tensor], moments: tuple[list[torch.Tensor], ...]
) -> bool:
    """Returns whether all are contiguous, and the moments of each variable have its layout."""
    if not all(tensor.is_contiguous() for tensors in (values, *moments) for tensor in tensors):
        return False
    session = sessions.current()
    if session is None:
        return True
    layouts = [
        list(map(session.strategy.layout, tensors)) for tensors in (values, *moments) if tensors
    ]
    return all(kind_layouts == layouts[0] for kind_layouts in layouts)


def _corrected_rate(
    optimizer: keras.optimizers.Adam, learning_rate: torch.Tensor | float, dtype: torch.dtype
) -> Any:
    """Returns the learning rate with the bias correction of both moments, computed as in Keras."""
    step = keras.ops.cast(optimizer.iterations + 1, dtype)
    first, second = (
        1 - keras.ops.power(keras.ops.cast(beta, dtype), step)
        for beta in (optimizer.beta_1, optimizer.beta_2)
    )
    return keras.ops.cast(learning_rate, dtype) * keras.ops.sqrt(second) / first


@attrs.frozen
class NumbersOfNadam:
    """Replaces Keras' module `core` for Nadam: in a trace a number stays a tensor."""

    core: Any
    capture: StepCapture[torch.Tensor]

    def convert_to_numpy(self, number: torch.Tensor) -> Any:
        """Returns `number`, a divisor: as a tensor it gives bitwise equal results."""
        return number if self.capture.is_recording() else self.core.convert_to_numpy(number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)
