"""What a strategy needs from a library of sharded tensors."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from shardcore.domain.layout import Layout


class ShardedTensors(Protocol):
    """Tensors over one mesh that know their layout and compute with it.

    A plain tensor is one that knows no layout: its values are taken as equal on all ranks.
    """

    def owns(self, tensor: Any) -> bool:
        """Whether `tensor` knows a layout on this mesh; else it is plain."""
        ...

    def layout(self, tensor: Any) -> Layout | None:
        """The layout of `tensor`, or None if it is plain.

        Raises:
            LayoutError: If it lies as no layout can say.
        """
        ...

    def shard(self, value: Any, layout: Layout) -> Any:
        """`value`, plain and whole on every rank, cut to `layout` without communication."""
        ...

    def keep(self, tensor: Any) -> Any:
        """`tensor`, known from now on as what a variable keeps between uses."""
        ...

    def join(self, part: Any, layout: Layout, shape: tuple[int, ...]) -> Any:
        """The tensor of global `shape` of which this rank brings `part`, without communication."""
        ...

    def redistribute(self, tensor: Any, layout: Layout) -> Any:
        """`tensor` in `layout`. The gradient comes back in the layout that `tensor` had."""
        ...

    def settle(self, tensor: Any) -> Any:
        """`tensor` with its pending reductions done; those of its gradient are done as well."""
        ...

    def whole(self, tensor: Any) -> Any:
        """The whole value as a plain tensor on every rank, detached."""
        ...

    def local(self, tensor: Any) -> Any:
        """What this rank stores of `tensor`, sharing its memory, differentiable."""
        ...

    def copy_into(self, stored: Any, value: Any) -> None:
        """Overwrite the values of `stored`, in place and in its layout, with those of `value`."""
        ...

    def on_gradient(self, stored: Any, layout: Layout) -> None:
        """Bring every gradient that `stored` will get into `layout`, once."""
        ...

    def promotion(self, visiting: bool = False) -> AbstractContextManager[None]:
        """A scope of this thread, in which it may start collectives.

        Args:
            visiting: Whether a collective raises, unless the thread may start some anyway.
        """
        ...
