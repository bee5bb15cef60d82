"""Strategies `dtensor` and `manual`: variables are sharded tensors that know their layout."""

from contextlib import AbstractContextManager
from typing import Generic

import attrs

from shardcore.domain.layouts.layout import Layout
from shardcore.ports.strategy import NewVariable, ShardedTensors
from shardcore.ports.types import TensorT


@attrs.frozen
class ShardedStrategy(Generic[TensorT]):
    """A strategy over a library of sharded tensors, to subclass in a plug-in.

    The library runs each operator and starts the collectives that it needs. The strategy decides
    when a layout changes: it shards a variable at its creation, brings its gradients to the
    storage layout once, and reduces partial sums at the edge of each layer, so that later
    operators do not reduce them again.

    Args:
        tensors: The library.

    Example:
        >>> class Replicated(ShardedStrategy):
        ...     def storage(self, variable):  # instead of the layout that a rule gives
        ...         return Layout.replicated(variable.layout.mesh, len(variable.shape))
    """

    tensors: ShardedTensors[TensorT]

    def storage(self, variable: NewVariable) -> Layout:
        """The layout that the distribution gives."""
        return variable.layout

    def create(self, value: TensorT, storage: Layout, variable: NewVariable) -> TensorT:
        """Shards `value`, and marks it as the value of a variable."""
        return self.tensors.mark_weight(self.tensors.shard(value, storage))

    def redistribute_gradients(self, stored: TensorT, storage: Layout) -> None:
        """Reduces gradients, which are partial sums as a rule, once, when they arrive."""
        self.tensors.redistribute_gradients(stored, storage)

    def assign(self, stored: TensorT, value: TensorT) -> None:
        """Overwrites `stored` in place, in its own layout."""
        self.tensors.copy_into(stored, value)

    def from_local(self, part: TensorT, layout: Layout, shape: tuple[int, ...]) -> TensorT:
        """Joins the parts of all ranks without communication."""
        return self.tensors.from_local(part, layout, shape)

    def redistribute(self, tensor: TensorT, layout: Layout | None) -> TensorT:
        """Redistributes to the layout that a rule names, else reduces partial sums."""
        if layout is None:
            return self.tensors.reduce_partial(tensor)
        if self.tensors.owns(tensor):
            return self.tensors.redistribute(tensor, layout)
        return self.tensors.shard(tensor, layout)

    def full_tensor(self, tensor: TensorT) -> TensorT:
        """Gathers the full tensor on every rank: a collective."""
        return self.tensors.full_tensor(tensor)

    def to_local(self, tensor: TensorT) -> TensorT:
        """The local shard, which shares memory."""
        return self.tensors.to_local(tensor)

    def owns(self, tensor: TensorT) -> bool:
        """Tells whether `tensor` is sharded over this mesh."""
        return self.tensors.owns(tensor)

    def layout(self, tensor: TensorT) -> Layout | None:
        """The layout of `tensor`, or None if it is plain."""
        return self.tensors.layout(tensor)

    def implicit_replication(
        self, forbid_collectives: bool = False
    ) -> AbstractContextManager[None]:
        """Opens the scope in which plain tensors count as replicated."""
        return self.tensors.implicit_replication(forbid_collectives)
