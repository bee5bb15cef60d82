"""Strategies `dtensor` and `manual`: variables are sharded tensors that know their layout."""

from contextlib import AbstractContextManager
from typing import Any

import attrs

from shardcore.domain.layout import Layout
from shardcore.ports.strategy import NewVariable, ShardedTensors


@attrs.frozen
class ShardedStrategy:
    """The life of a variable whose library computes with layouts by itself.

    The library knows every tensor's layout and moves what an operator needs. What is left to
    decide is when: variables are cut at creation, gradients brought into the storage layout once,
    and sums left pending by a layer are reduced at its edge, so that the choice is not made
    again, and paid for again, by every later operator.
    """

    tensors: ShardedTensors

    def storage(self, variable: NewVariable) -> Layout:
        """Returns the layout that the distribution gives."""
        return variable.layout

    def create(self, value: Any, storage: Layout) -> Any:
        """Returns this rank's part of `value`."""
        return self.tensors.keep(self.tensors.shard(value, storage))

    def track(self, stored: Any, storage: Layout) -> None:
        """Gradients usually arrive as pending sums: they are reduced once, as they arrive."""
        self.tensors.on_gradient(stored, storage)

    def assign(self, stored: Any, value: Any) -> None:
        """Overwrites `stored` in place, in its own layout."""
        self.tensors.copy_into(stored, value)

    def join(self, part: Any, layout: Layout, shape: tuple[int, ...]) -> Any:
        """Returns the parts as they are: no communication."""
        return self.tensors.join(part, layout, shape)

    def activation(self, tensor: Any, layout: Layout | None) -> Any:
        """Returns it in the layout that a rule asks for, else with its pending sums reduced."""
        if layout is None:
            return self.tensors.settle(tensor)
        if self.tensors.owns(tensor):
            return self.tensors.redistribute(tensor, layout)
        return self.tensors.shard(tensor, layout)

    def whole(self, tensor: Any) -> Any:
        """Returns the whole value on every rank."""
        return self.tensors.whole(tensor)

    def local(self, tensor: Any) -> Any:
        """Returns what this rank stores."""
        return self.tensors.local(tensor)

    def owns(self, tensor: Any) -> bool:
        """Returns whether `tensor` is sharded over this mesh."""
        return self.tensors.owns(tensor)

    def layout(self, tensor: Any) -> Layout | None:
        """Returns the layout of `tensor`, or None if it is plain."""
        return self.tensors.layout(tensor)

    def scope(self, visiting: bool = False) -> AbstractContextManager[None]:
        """Returns the scope in which plain tensors count as replicated."""
        return self.tensors.scope(visiting)
