"""Patches: initial values of large variables; a rank makes only its shard (ADR 34).

It draws all random numbers, in pieces, and keeps its own.
"""

from typing import Any

import attrs
import numpy
import torch
from keras import Variable, initializers

from shardcore.binding import keras_private
from shardcore.binding.engine import variable
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.types import Original
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.memory_order import overlap, pieces

# Elements of a piece. Smaller variables are made at once.
PIECE = 1 << 16

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
class NewShard:
    """The variable in creation: a draw of its shape returns only this rank's shard."""

    session: Session
    shape: tuple[int, ...]
    layout: Layout

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard."""
        return self.layout.local_shape(self.shape, self.session.world.position)

    def join(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns the sharded tensor of the shards of all ranks."""
        return self.session.from_local(shard, self.layout, self.shape)


@replaces(
    "keras.src.backend.common.variables:Variable._initialize_with_initializer",
    reason="Draws the full value; a rank keeps its shard.",
)
def initialize(sessions: Sessions, original: Original, new: Variable, initializer: object) -> None:
    """Replaces `Variable._initialize_with_initializer`: makes a shard of a large value."""
    session, shape, call = sessions.current(), tuple(new.shape), type(initializer).__call__
    is_large = torch.Size(shape).numel() > PIECE and not keras_private.is_symbolic()
    if session is None or session.mesh.size == 1 or not is_large:
        original(new, initializer)
        return
    shard = NewShard(session, shape, variable.ruled_layout(new, session))
    if call in _NUMBERS and not numpy.ndim(getattr(initializer, "value", 0)):
        drawn = keras_private.initial_value(new, initializer, shard.local_shape)
        keras_private.initialize(new, shard.join(drawn))
        return
    if call in _DRAWS and _can_be_drawn(shard.layout):
        sessions.shard_being_drawn = shard
    try:
        original(new, initializer)
    finally:
        sessions.shard_being_drawn = None


def _can_be_drawn(layout: Layout) -> bool:
    """Returns whether pieces have the numbers of one draw; CUDA's generator gives others."""
    is_one_part = all(count == 1 for count in layout.segments)
    return is_one_part and torch.device(keras_private.torch_device()).type == "cpu"


@replaces(
    "keras.src.backend.torch.random:normal",
    "keras.src.backend.torch.random:truncated_normal",
    "keras.src.backend.torch.random:uniform",
    reason="Makes several copies of the full value of a variable.",
)
def draw(
    sessions: Sessions, original: Original, shape: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Replaces `normal`, `truncated_normal` and `uniform`: draws a variable in creation in pieces.

    All pieces are drawn from one generator, so that they have the numbers of one draw.
    """
    new: NewShard | None = sessions.shard_being_drawn
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
