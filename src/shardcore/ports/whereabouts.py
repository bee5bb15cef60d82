"""Where in the model this thread is, what it moves, and who sees that: for `explain`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import attrs

from shardcore.domain.explanation.reasons import Facts
from shardcore.domain.layout import Layout

_T = TypeVar("_T")


@attrs.frozen(eq=False)
class Move:
    """A tensor that is being brought from one layout into another.

    Args:
        part: What this rank has of it.
        shape: Its global shape.
        source: The layout that it has.
        target: The layout that it gets.
    """

    part: Any = attrs.field(repr=False)
    shape: tuple[int, ...]
    source: Layout
    target: Layout


# Set inside a `with`, on its thread. They are of the process: a redistribution and a bucket of
# gradients are far below those who know of layers, and called by torch, which hands on nothing.
_layer: ContextVar[str] = ContextVar("layer", default="")
_move: ContextVar[Move | None] = ContextVar("move", default=None)
_reduced: ContextVar[tuple[Any, ...]] = ContextVar("reduced", default=())


def inside(layer: str) -> AbstractContextManager[None]:
    """The call of the layer at the path `layer`.

    Example:
        >>> with inside("decoder"), inside("decoder/dense"):
        ...     current_layer()
        'decoder/dense'
        >>> current_layer()
        ''
    """
    return _as(_layer, layer)


def current_layer() -> str:
    """The path of the innermost layer that is being called; empty outside, as in a backward."""
    return _layer.get()


def moving(move: Move) -> AbstractContextManager[None]:
    """The collectives of a redistribution."""
    return _as(_move, move)


def current_move() -> Move | None:
    """The redistribution that this thread is in, None outside."""
    return _move.get()


def reducing(parameters: Sequence[Any]) -> AbstractContextManager[None]:
    """The collectives that reduce together the gradients of `parameters`, or their new values."""
    return _as(_reduced, tuple(parameters))


def currently_reduced() -> tuple[Any, ...]:
    """The parameters whose gradients or values this thread reduces together, none outside."""
    return _reduced.get()


@contextmanager
def _as(variable: "ContextVar[_T]", value: _T) -> Iterator[None]:
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


class Witness(Protocol):
    """Sees the collectives of this thread, each before it is started."""

    def watching(self) -> AbstractContextManager[None]:
        """Collectives are seen inside."""

    def inside(self, layer: str) -> AbstractContextManager[None]:
        """The call of the layer at the path `layer`: what it computes has a backward of its own."""


# Makes a witness that calls the first, and knows the variables, which are tensors by path.
Watch = Callable[[Callable[[Facts], None], Mapping[str, Any]], Witness]
