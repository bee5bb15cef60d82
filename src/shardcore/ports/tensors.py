"""What a strategy needs from a library of sharded tensors."""

from typing import Any, Protocol

from shardcore.domain.layout import Layout
from shardcore.ports.strategy import Tensors


class ShardedTensors(Tensors, Protocol):
    """Tensors over one mesh that know their layout and compute with it."""

    def shard(self, value: Any, layout: Layout) -> Any:
        """`value`, plain and whole on every rank, cut to `layout` without communication."""

    def keep(self, tensor: Any) -> Any:
        """`tensor`, known from now on as what a variable keeps between uses."""

    def redistribute(self, tensor: Any, layout: Layout) -> Any:
        """`tensor` in `layout`. The gradient comes back in the layout that `tensor` had."""

    def settle(self, tensor: Any) -> Any:
        """`tensor` with its pending reductions done; those of its gradient are done as well."""

    def copy_into(self, stored: Any, value: Any) -> None:
        """Overwrite the values of `stored`, in place and in its layout, with those of `value`."""

    def on_gradient(self, stored: Any, layout: Layout) -> None:
        """Bring every gradient that `stored` will get into `layout`, once."""
