"""Where in the model this thread is, what it moves, and who sees that: for `explain`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeVar

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


@attrs.frozen(eq=False)
class Scope(Generic[_T]):
    """A value that is set inside a `with`, on its thread.

    Example:
        >>> with layer_scope("decoder"), layer_scope("decoder/dense"):
        ...     layer_scope.now()
        'decoder/dense'
        >>> layer_scope.now()
        ''
    """

    _variable: ContextVar[_T]

    @contextmanager
    def __call__(self, value: _T) -> Iterator[None]:
        """Sets the value inside."""
        before = self._variable.set(value)
        try:
            yield
        finally:
            self._variable.reset(before)

    def now(self) -> _T:
        """Returns the value of the innermost `with`; outside of all the default."""
        return self._variable.get()


# They are of the process: a redistribution and a bucket of gradients are far below those who know
# of layers, and called by torch, which hands on nothing.
# The path of the layer that is being called; empty outside, as in a backward pass.
layer_scope = Scope(ContextVar("layer", default=""))
# The redistribution whose collectives are started.
redistribution_scope = Scope[Move | None](ContextVar("move", default=None))
# The parameters whose gradients, or new values, are reduced together.
reduction_scope = Scope[Sequence[Any]](ContextVar("reduced", default=()))


class CollectiveTracer(Protocol):
    """Sees the collectives of this thread, each before it is started."""

    def tracing(self) -> AbstractContextManager[None]:
        """Collectives are seen inside."""

    def layer(self, layer: str) -> AbstractContextManager[None]:
        """The call of the layer at the path `layer`: what it computes has a backward of its own."""


# Makes a tracer that calls the first, and knows the variables, which are tensors by path.
TracerFactory = Callable[[Callable[[Facts], None], Mapping[str, Any]], CollectiveTracer]
