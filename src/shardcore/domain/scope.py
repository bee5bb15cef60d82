"""A value that is set inside a `with`, for code that gets no argument which names it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Scope(Generic[_T]):
    """A value that is set inside a `with`, on its thread.

    Example:
        >>> layer_scope = Scope("layer", default="")
        >>> with layer_scope("decoder"), layer_scope("decoder/dense"):
        ...     layer_scope.now()
        'decoder/dense'
        >>> layer_scope.now()
        ''
    """

    def __init__(self, name: str, default: _T) -> None:
        self._variable = ContextVar(name, default=default)

    @contextmanager
    def __call__(self, value: _T) -> Iterator[None]:
        """Sets the value inside the `with`."""
        before = self._variable.set(value)
        try:
            yield
        finally:
            self._variable.reset(before)

    def now(self) -> _T:
        """The value of the innermost `with`; outside of all the default."""
        return self._variable.get()
