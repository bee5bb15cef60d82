"""Redistributed copies of tensors, which later uses in the same step find again.

Activations: the backward pass reads the copy that the forward pass has all-gathered, and a partial
sum that several operators read is reduced once. Weights: a recurrent layer uses its kernel at each
time step, and the kernel is all-gathered once.
"""

from collections import OrderedDict
from collections.abc import Hashable
from math import inf
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.engine.tensor import Memory, ShardedTensor
from shardcore.domain.placements import Replicate
from shardcore.domain.steps.gradient_buckets import BUCKET_BYTES


@attrs.frozen(eq=False)
class Redistributed:
    """A copy of a tensor in another layout."""

    tensor: Any
    serves: bool  # whether products read it in place of the shards
    of: torch.Tensor  # the shard that was copied, kept so that no other has its id
    stamp: Hashable  # a value that changes when either is written, or the step ends


def note(tensor: ShardedTensor, found: ShardedTensor, serves: bool = False) -> None:
    """Notes that `found` has the values of `tensor`, unless a copy that splits less is known.

    `UnshardedWeights` holds weights. `serves` says whether products read `found` from now on.
    """
    known = find(tensor)
    # A partial tensor would be read as its sum.
    if (
        tensor.form.weight
        or found.form.layout.partial
        or (known is not None and splits_less(tensor, known.tensor))
    ):
        return
    memory = tensor.memory
    if memory.redistributed is None:
        memory.redistributed = {}
    memory.redistributed[_place(tensor)] = Redistributed(
        found, serves, tensor.part, _stamp(tensor, found)
    )


def find(tensor: ShardedTensor) -> Redistributed | None:
    """Returns the copy of `tensor` in another layout, None if there is none."""
    known: dict[Hashable, Redistributed] | None = tensor.memory.redistributed
    found = known.get(_place(tensor)) if known else None
    return found if found and found.stamp == _stamp(tensor, found.tensor) else None


def handed_out(tensor: ShardedTensor, value: torch.Tensor) -> torch.Tensor:
    """Returns the full `value` of `tensor` for the user, in memory that no operator reads later.

    NumPy may write into it, and torch does not count that.
    """
    return value if find(tensor) is None else value.clone()


def _place(tensor: ShardedTensor) -> Hashable:
    """Returns a key that is equal for equal views of a tensor, not for others."""
    part = tensor.part
    return tensor.form, torch_private.memory_of(part), part.storage_offset(), part.stride()


def _stamp(tensor: ShardedTensor, found: ShardedTensor) -> Hashable:
    return (
        tensor.engine.steps,
        tensor.memory.writes,
        torch_private.version_of(tensor.part),
        found.memory.writes,
        torch_private.version_of(found.part),
    )


def splits_less(tensor: ShardedTensor, other: ShardedTensor) -> bool:
    """Returns whether `other` has the layout of `tensor`, but is replicated along some axes."""
    before, after = tensor.form.layout, other.form.layout
    names = before.mesh.axis_names
    moved = [axis for axis in names if before.placement(axis) != after.placement(axis)]
    return bool(moved) and all(isinstance(after.placement(axis), Replicate) for axis in moved)


@attrs.define
class UnshardedWeights:
    """A cache of unsharded weights, each valid until it is written or the step ends."""

    # The bytes that it holds; the oldest entries go first. Larger weights are not held.
    size: float = BUCKET_BYTES
    # Each value with its weight, kept so that no other tensor gets its address.
    _entries: "OrderedDict[Hashable, tuple[torch.Tensor, Any]]" = attrs.field(
        factory=OrderedDict, init=False
    )

    def get(self, memory: Memory, part: torch.Tensor, move: Any, engine: Any) -> torch.Tensor:
        """Returns the local shard of a weight after `move`; `part` is its stored shard."""
        stored = move.as_in_memory(part)
        at = torch_private.memory_of(part), part.storage_offset()
        place = (at, tuple(stored.shape), stored.stride(), part.dtype)
        writes = (memory.writes, torch_private.version_of(part))
        key = (id(memory), writes, place, move.target)
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
            held: torch.Tensor = move.as_asked(found[0])
            return held
        value: torch.Tensor = move.run(part, engine)
        if value.nbytes <= self.size:
            self._entries[key] = (move.as_in_memory(value), (memory, part))
            while sum(each.nbytes for each, _ in self._entries.values()) > self.size:
                self._entries.popitem(last=False)
        return value

    @property
    def holds_steps(self) -> bool:
        """Whether weights of any size are held until the step ends."""
        return self.size == inf

    def clear(self) -> None:
        """Drops all weights."""
        self._entries.clear()
