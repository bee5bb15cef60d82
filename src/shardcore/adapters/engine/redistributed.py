"""Redistributed copies of tensors: a cache for later uses in the same step (ADR 17).

Activations: the backward pass reads the copy that the forward pass has all-gathered, and a partial
sum that several operators read is reduced once. Weights: a recurrent layer uses its kernel at each
time step, and the kernel is all-gathered once.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.engine.tensor import Memory, ShardedTensor
from shardcore.domain.engine.held_weights import (
    PER_STEP,
    PER_USE,
    LatestWeights,
    WeightSize,
    size_of,
)
from shardcore.domain.layouts.derived_layouts import is_less_sharded


@attrs.frozen(eq=False)
class Redistributed:
    """A copy of a tensor in another layout."""

    tensor: Any
    serves: bool  # whether products read it in place of the shards
    of: torch.Tensor  # the shard that was copied, kept so that no other has its id
    stamp: Hashable  # a value that changes when either is written, or the step ends


def note_copy(tensor: ShardedTensor, copy: ShardedTensor, serves: bool = False) -> None:
    """Caches `copy`, which has the values of `tensor`, unless a copy that shards less is cached.

    `UnshardedWeights` caches weights. `serves` says whether products read `copy` from now on.
    """
    known = find_copy(tensor)
    # A partial tensor would be read as its sum.
    if (
        tensor.form.weight
        or copy.form.layout.partial
        or (known is not None and is_less_sharded(tensor.form.layout, known.tensor.form.layout))
    ):
        return
    memory = tensor.memory
    if memory.redistributed is None:
        memory.redistributed = {}
    memory.redistributed[_view_key(tensor)] = Redistributed(
        copy, serves, tensor.part, _stamp(tensor, copy)
    )


def find_copy(tensor: ShardedTensor) -> Redistributed | None:
    """Looks up a copy of `tensor` in another layout; None if there is none, or it is stale."""
    known: dict[Hashable, Redistributed] | None = tensor.memory.redistributed
    copy = known.get(_view_key(tensor)) if known else None
    return copy if copy and copy.stamp == _stamp(tensor, copy.tensor) else None


def clone_if_cached(tensor: ShardedTensor, value: torch.Tensor) -> torch.Tensor:
    """Clones the full `value` of `tensor` for the user, if it is the cached copy.

    NumPy may write into it, which torch does not count; a cached copy would then be wrong.
    """
    return value if find_copy(tensor) is None else value.clone()


def _view_key(tensor: ShardedTensor) -> Hashable:
    """Identifies the elements of `tensor`: equal views have equal keys."""
    part = tensor.part
    return tensor.form, torch_private.memory_of(part), part.storage_offset(), part.stride()


def _stamp(tensor: ShardedTensor, copy: ShardedTensor) -> Hashable:
    return (
        tensor.engine.steps,
        tensor.memory.writes,
        torch_private.version_of(tensor.part),
        copy.memory.writes,
        torch_private.version_of(copy.part),
    )


@attrs.define
class UnshardedWeights:
    """A cache of unsharded weights, each valid until it is written or the step ends."""

    sizes: Sequence[WeightSize] = PER_USE
    # Each with its shard: no other tensor gets its address meanwhile.
    _latest: dict[WeightSize, LatestWeights[tuple[torch.Tensor, object]]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._latest = {size: LatestWeights(size) for size in self.sizes}

    def get(self, memory: Memory, part: torch.Tensor, move: Any, engine: Any) -> torch.Tensor:
        """Looks up the local shard of a weight after `move`; `part` is its stored shard."""
        stored = move.to_step_order(part)
        at = torch_private.memory_of(part), part.storage_offset()
        identity = (at, tuple(stored.shape), stored.stride(), part.dtype)
        writes = (memory.writes, torch_private.version_of(part))
        key = (id(memory), writes, identity, move.target)
        for latest in self._latest.values():
            cached = latest.find(key)
            if cached is not None:
                held: torch.Tensor = move.to_form_order(cached[0])
                return held
        value: torch.Tensor = move.run(part, engine)
        size = size_of(value.nbytes, self.sizes)
        if size is not None:
            held = move.to_step_order(value)
            self._latest[size].add(key, (held, (memory, part)), held.nbytes)
        return value

    @property
    def bytes(self) -> int:
        """The bytes of the weights that it holds."""
        return sum(latest.bytes for latest in self._latest.values())

    @property
    def holds_steps(self) -> bool:
        """Whether weights of any size are held until the step ends."""
        return self.sizes == PER_STEP

    def clear(self) -> None:
        """Drops all weights."""
        for latest in self._latest.values():
            latest.clear()
