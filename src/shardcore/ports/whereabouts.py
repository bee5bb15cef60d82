"""Where in the model this thread is, and what it moves: for what has no idea of layers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import attrs

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


@contextmanager
def inside(layer: str) -> Iterator[None]:
    """The call of the layer at the path `layer`.

    Example:
        >>> with inside("decoder"), inside("decoder/dense"):
        ...     current_layer()
        'decoder/dense'
        >>> current_layer()
        ''
    """
    with _as(_layer, layer):
        yield


def current_layer() -> str:
    """The path of the innermost layer that is being called; empty outside, as in a backward."""
    return _layer.get()


@contextmanager
def moving(move: Move) -> Iterator[None]:
    """The collectives of a redistribution."""
    with _as(_move, move):
        yield


def current_move() -> Move | None:
    """The redistribution that this thread is in, None outside."""
    return _move.get()


@contextmanager
def reducing(parameters: Sequence[Any]) -> Iterator[None]:
    """The collectives that reduce together the gradients of `parameters`, or their new values."""
    with _as(_reduced, tuple(parameters)):
        yield


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
