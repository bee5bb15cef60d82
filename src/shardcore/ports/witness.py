"""What explaining a step needs from outside: somebody who sees its collectives."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs

from shardcore.ports.whereabouts import Move


@attrs.frozen(eq=False)
class Seen:
    """One collective.

    Args:
        kind: "all_reduce", "all_gather", ...
        processes: Those that take part.
        operand_bytes: The bytes of this rank's operands.
        backward: Whether a backward pass runs.
        layer: The layer that is being called, or whose operator the backward pass is at.
        operator: The operator on sharded tensors that needs it, None outside.
        fell_back: Whether that operator runs on whole operands, as it cannot be split.
        move: The redistribution that it belongs to, None if it is of none.
        variable: The variable that is moved, None if something else is.
        reduced: The variables whose gradients are moved, or whose new values after the pass.
    """

    kind: str
    processes: tuple[int, ...]
    operand_bytes: int
    backward: bool
    layer: str
    operator: str | None
    fell_back: bool
    move: Move | None
    variable: str | None
    reduced: tuple[str, ...]


class Witness(Protocol):
    """Sees the collectives of this thread, and tells of each before it is started."""

    def watching(self) -> AbstractContextManager[None]:
        """Collectives are seen inside."""

    def inside(self, layer: str) -> AbstractContextManager[None]:
        """The call of the layer at the path `layer`: what it computes has a backward of its own."""


# Makes a witness that calls the first, and knows the variables, which are tensors by path.
Watch = Callable[[Callable[[Seen], None], Mapping[str, Any]], Witness]
