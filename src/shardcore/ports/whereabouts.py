"""Where in the model this thread is: for messages of what has no idea of layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_layer: ContextVar[str] = ContextVar("layer", default="")


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
    before = _layer.set(layer)
    try:
        yield
    finally:
        _layer.reset(before)


def current_layer() -> str:
    """The path of the innermost layer that is being called; empty outside, as in a backward."""
    return _layer.get()
