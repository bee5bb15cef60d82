"""Patches: large values, made in pieces: initial values, and quantized kernels.

Of an initial value a rank draws all random numbers, and makes only its shard (ADR 34). To quantize
a kernel, Keras makes several copies of it in NumPy.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import attrs
import numpy
import torch
from keras import Variable, initializers

from shardcore.binding import keras_private
from shardcore.binding.engine.variable import full_tensor, ruled_layout
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.types import Original
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.memory_order import overlap, pieces
from shardcore.domain.scope import Scope

# Elements of a piece. Smaller variables are made at once.
PIECE = 1 << 16
# Elements that Keras quantizes at once.
_QUANTIZED_PIECE = 1 << 18

# The calls of Keras' initializers whose value is that of one draw, or one number.
_DRAWS = {
    initializer.__call__
    for initializer in (
        initializers.RandomNormal,
        initializers.RandomUniform,
        initializers.TruncatedNormal,
        initializers.VarianceScaling,
    )
}
_NUMBERS = {
    initializer.__call__
    for initializer in (initializers.Constant, initializers.Ones, initializers.Zeros)
}


@attrs.frozen(eq=False)
class _NewShard:
    """The variable in creation: a draw of its shape returns only this rank's shard."""

    session: Session
    shape: tuple[int, ...]
    layout: Layout

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.layout.local_shape(self.shape, self.session.world.position)

    def join(self, shard: torch.Tensor) -> torch.Tensor:
        return self.session.from_local(shard, self.layout, self.shape)


# Keras' initializer draws it, and passes no argument that names the variable.
_shard_being_drawn = Scope[_NewShard | None]("shard_being_drawn", default=None)


@replaces(
    "keras.src.backend.common.variables:Variable._initialize_with_initializer",
    reason="Draws the full value; a rank keeps its shard.",
)
def initialize(sessions: Sessions, original: Original, new: Variable, initializer: object) -> None:
    """Replaces `Variable._initialize_with_initializer`: makes a shard of a large value."""
    session, shape, call = sessions.shared(), tuple(new.shape), type(initializer).__call__
    is_large = torch.Size(shape).numel() > PIECE and not keras_private.is_symbolic()
    if session is None or not is_large:
        original(new, initializer)
        return
    shard = _NewShard(session, shape, ruled_layout(new, session))
    if call in _NUMBERS and not numpy.ndim(getattr(initializer, "value", 0)):
        drawn = keras_private.initial_value(new, initializer, shard.local_shape)
        keras_private.initialize(new, shard.join(drawn))
        return
    is_drawn = call in _DRAWS and _can_be_drawn(shard.layout)
    with _shard_being_drawn(shard if is_drawn else None):
        original(new, initializer)


def _can_be_drawn(layout: Layout) -> bool:
    """Tells whether pieces have the numbers of one draw; CUDA's generator gives others."""
    is_one_part = all(count == 1 for count in layout.segments)
    return is_one_part and torch.device(keras_private.torch_device()).type == "cpu"


@replaces(
    "keras.src.backend.torch.random:normal",
    "keras.src.backend.torch.random:truncated_normal",
    "keras.src.backend.torch.random:uniform",
    reason="Makes several copies of the full value of a variable.",
)
def draw(original: Original, shape: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replaces `normal`, `truncated_normal` and `uniform`: draws a variable in creation in pieces.

    All pieces are drawn from one generator, so that they have the numbers of one draw.
    """
    new = _shard_being_drawn.now()
    if new is None or tuple(shape) != new.shape:
        value: torch.Tensor = original(shape, *args, **kwargs)
        return value
    seed = kwargs.pop("seed")
    generator = keras_private.generator_of(seed)
    if generator is None:  # nothing has values
        return new.join(original(new.local_shape, *args, seed=seed, **kwargs))
    held = new.layout.slices(new.shape, new.session.world.position)
    shard = torch.empty(())
    for number, piece in enumerate(pieces(new.shape, PIECE)):
        size = tuple(part.stop - part.start for part in piece)
        drawn = original(size, *args, seed=generator, **kwargs)
        if number == 0:
            shard = drawn.new_empty(new.local_shape)
        source, target = overlap(piece, held)
        shard[target] = drawn[source]
    return new.join(shard)


@replaces(
    "keras.src.quantizers.quantizers:abs_max_quantize",
    reason="Makes several full copies of a sharded kernel.",
    everywhere=True,
)
@replaces(
    "keras.src.quantizers.quantizers:abs_max_quantize_grouped_with_zero_point",
    reason="Makes several full copies of a sharded kernel.",
    since=(3, 14),
    everywhere=True,
)
def in_pieces(
    sessions: Sessions, original: Original, inputs: Any, *args: object, **kwargs: object
) -> Any:
    """Replaces `abs_max_quantize` and its grouped form: quantizes a sharded kernel in pieces.

    Pieces are slices along a dim whose indices each have their own scales, so the codes and scales
    are those of the full kernel. Inputs of a layer are left out, because NumPy does not copy them.
    """
    value = getattr(inputs, "value", inputs)  # of a Keras variable
    call = inspect.signature(original).bind(value, *args, **kwargs)
    call.apply_defaults()
    is_sharded = sessions.strategy_of_tensor(value) is not None
    is_large = call.arguments["to_numpy"] and is_sharded and value.numel() > _QUANTIZED_PIECE
    # The grouped form has groups of rows.
    dim = _scaled_dim(value.shape, call.arguments.get("axis", 0)) if is_large else None
    if dim is None:
        return original(inputs, *args, **kwargs)
    full: torch.Tensor = full_tensor(value, sessions)
    indices = max(1, _QUANTIZED_PIECE * full.shape[dim] // full.numel())
    codes, scales = torch.empty(()), []
    for start in range(0, full.shape[dim], indices):
        call.arguments["inputs"] = full.narrow(dim, start, min(indices, full.shape[dim] - start))
        piece_codes, *of_piece = original(*call.args, **call.kwargs)
        if start == 0:
            codes = piece_codes.new_empty(full.shape)
        codes.narrow(dim, start, piece_codes.shape[dim]).copy_(piece_codes)
        scales.append(of_piece)
    return codes, *(torch.cat(parts, dim) for parts in zip(*scales, strict=True))


def _scaled_dim(shape: Sequence[int], axis: int | Sequence[int] | None) -> int | None:
    """Chooses the longest dim that is not reduced for the scales, None without one.

    Example:
        >>> _scaled_dim((4, 8, 6), axis=(0, -1)), _scaled_dim((4, 8), axis=(0, 1))
        (1, None)
    """
    axes = range(len(shape)) if axis is None else [axis] if isinstance(axis, int) else axis
    reduced = {dim % len(shape) for dim in axes}
    scaled = [dim for dim in range(len(shape)) if dim not in reduced]
    return max(scaled, key=shape.__getitem__, default=None)
