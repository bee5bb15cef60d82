"""Patches: functions that quantize a kernel. In Keras, NumPy makes several copies of it."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from shardcore.binding.engine.variable import full_tensor
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks.session import Sessions
from shardcore.binding.types import Original

# Elements that Keras quantizes at once.
PIECE = 1 << 18


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
    is_sharded = isinstance(value, torch.Tensor) and sessions.strategy_of_tensor(value) is not None
    is_large = call.arguments["to_numpy"] and is_sharded and value.numel() > PIECE
    # The grouped form has groups of rows.
    dim = _scaled_dim(value.shape, call.arguments.get("axis", 0)) if is_large else None
    if dim is None:
        return original(inputs, *args, **kwargs)
    full: torch.Tensor = full_tensor(value, sessions)
    indices = max(1, PIECE * full.shape[dim] // full.numel())
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
    """Returns the longest dim that is not reduced for the scales, None without one.

    Example:
        >>> _scaled_dim((4, 8, 6), axis=(0, -1)), _scaled_dim((4, 8), axis=(0, 1))
        (1, None)
    """
    axes = range(len(shape)) if axis is None else [axis] if isinstance(axis, int) else axis
    reduced = {dim % len(shape) for dim in axes}
    scaled = [dim for dim in range(len(shape)) if dim not in reduced]
    return max(scaled, key=shape.__getitem__, default=None)
