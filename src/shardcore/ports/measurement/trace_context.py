"""The layer, redistribution and reduction that this thread runs, for `explain`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeVar

import attrs

from shardcore.domain.explanation.reasons import CollectiveFacts
from shardcore.domain.layout import Layout

_T = TypeVar("_T")


@attrs.frozen(eq=False)
class Move:
    """A tensor that is being redistributed."""

    part: Any = attrs.field(repr=False)  # the local shard of this rank
    shape: tuple[int, ...]  # its global shape
    source: Layout  # its layout before
    target: Layout  # its layout after
    to_next: bool = False  # whether each rank sends its part to the next one only


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
        """Sets the value inside the `with`."""
        before = self._variable.set(value)
        try:
            yield
        finally:
            self._variable.reset(before)

    def now(self) -> _T:
        """Returns the value of the innermost `with`; outside of all the default."""
        return self._variable.get()


# They belong to the process: torch calls the code that redistributes, or that reduces a bucket of
# gradients, and passes it no argument that names the layer.
# The path of the layer that is being called; empty outside, as in a backward pass.
layer_scope = Scope(ContextVar("layer", default=""))
# The redistribution whose collectives are started.
redistribution_scope = Scope[Move | None](ContextVar("move", default=None))
# The parameters whose gradients, or new values, are reduced together.
reduction_scope = Scope[Sequence[Any]](ContextVar("reduced", default=()))
# Whether each gradient is reduced by itself: a trace forms the buckets afterwards.
gradients_apart_scope = Scope(ContextVar("gradients_apart", default=False))


class CollectiveTracer(Protocol):
    """A tracer, which gets the collectives of this thread, each before it is started."""

    def tracing(self) -> AbstractContextManager[None]:
        """Returns a scope in which collectives are traced."""

    def layer(self, layer: str) -> AbstractContextManager[None]:
        """Returns the scope of a call of the layer at the path `layer`, with its backward pass."""


# Makes a tracer that calls the first argument; the second has the variables, tensors by path.
TracerFactory = Callable[[Callable[[CollectiveFacts], None], Mapping[str, Any]], CollectiveTracer]
