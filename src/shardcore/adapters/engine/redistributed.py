"""Redistributed copies of tensors, which later uses in the same step find again.

Activations: the backward pass reads the copy that the forward pass has all-gathered, and a partial
sum that several operators read is reduced once. Weights: a recurrent layer uses its kernel at each
time step, and the kernel is all-gathered once.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.engine.tensor import Memory, ShardedTensor
from shardcore.domain.placements import Replicate
from shardcore.domain.steps.held_weights import PER_STEP, PER_USE, WeightSize, size_of


@attrs.frozen(eq=False)
class Redistributed:
    """A copy of a tensor in another layout."""

    tensor: Any
    serves: bool  # whether products read it in place of the shards
    of: torch.Tensor  # the shard that was copied, kept so that no other has its id
    stamp: Hashable  # a value that changes when either is written, or the step ends


def note(tensor: ShardedTensor, found: ShardedTensor, serves: bool = False) -> None:
    """Notes that `found` has the values of `tensor`, unless a copy that shards less is known.

    `UnshardedWeights` holds weights. `serves` says whether products read `found` from now on.
    """
    known = find(tensor)
    # A partial tensor would be read as its sum.
    if (
        tensor.form.weight
        or found.form.layout.partial
        or (known is not None and shards_less(tensor, known.tensor))
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


def shards_less(tensor: ShardedTensor, other: ShardedTensor) -> bool:
    """Returns whether `other` has the layout of `tensor`, but is replicated along some axes."""
    before, after = tensor.form.layout, other.form.layout
    names = before.mesh.axis_names
    moved = [axis for axis in names if before.placement(axis) != after.placement(axis)]
    return bool(moved) and all(isinstance(after.placement(axis), Replicate) for axis in moved)


@attrs.define
class _Latest:
    """The latest unsharded weights of a size, each with its shard."""

    size: WeightSize
    bytes: int = attrs.field(default=0, init=False)
    # The oldest first. A shard is kept, so that no other tensor gets its address.
    _entries: "OrderedDict[Hashable, tuple[torch.Tensor, Any]]" = attrs.field(
        factory=OrderedDict, init=False
    )

    def find(self, key: Hashable) -> torch.Tensor | None:
        """Returns the weight of `key`, which is the latest from now on."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def add(self, key: Hashable, weight: torch.Tensor, shard: object) -> None:
        """Adds a weight; drops the oldest ones if they are too many bytes."""
        self._entries[key] = weight, shard
        self.bytes += weight.nbytes
        while self.bytes > self.size.total:
            _, (oldest, _) = self._entries.popitem(last=False)
            self.bytes -= oldest.nbytes

    def clear(self) -> None:
        """Drops all weights."""
        self._entries.clear()
        self.bytes = 0


@attrs.define
class UnshardedWeights:
    """A cache of unsharded weights, each valid until it is written or the step ends."""

    sizes: Sequence[WeightSize] = PER_USE
    _latest: dict[WeightSize, _Latest] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._latest = {each: _Latest(each) for each in self.sizes}

    def get(self, memory: Memory, part: torch.Tensor, move: Any, engine: Any) -> torch.Tensor:
        """Returns the local shard of a weight after `move`; `part` is its stored shard."""
        stored = move.as_in_memory(part)
        at = torch_private.memory_of(part), part.storage_offset()
        place = (at, tuple(stored.shape), stored.stride(), part.dtype)
        writes = (memory.writes, torch_private.version_of(part))
        key = (id(memory), writes, place, move.target)
        for each in self._latest.values():
            found = each.find(key)
            if found is not None:
                held: torch.Tensor = move.as_asked(found)
                return held
        value: torch.Tensor = move.run(part, engine)
        size = size_of(value.nbytes, self.sizes)
        if size is not None:
            self._latest[size].add(key, move.as_in_memory(value), (memory, part))
        return value

    @property
    def bytes(self) -> int:
        """The bytes of the weights that it holds."""
        return sum(each.bytes for each in self._latest.values())

    @property
    def holds_steps(self) -> bool:
        """Whether weights of any size are held until the step ends."""
        return self.sizes == PER_STEP

    def clear(self) -> None:
        """Drops all weights."""
        for each in self._latest.values():
            each.clear()
