"""Weights that were all-gathered for a use, kept for the next uses of the same step."""

from collections import OrderedDict
from collections.abc import Hashable
from math import inf
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat

# As much as the gradients that wait to be reduced together.
BYTES = 25 * 1024 * 1024


@attrs.frozen
class _Entry:
    value: torch.Tensor
    of: tuple[Any, torch.Tensor]  # kept, so that neither is another's at the same address

    @property
    def bytes(self) -> int:
        return self.value.numel() * self.value.element_size()


@attrs.define
class Unsharded:
    """The weights that were unsharded lately, each until it is written, or the step ends.

    A recurrent layer uses its kernel at each time step, and the kernel is all-gathered once.

    Args:
        size: The bytes that are held; the oldest go first. Larger weights are not held.
    """

    size: float = BYTES
    _entries: "OrderedDict[Hashable, _Entry]" = attrs.field(factory=OrderedDict, init=False)

    def get(self, memory: Any, part: torch.Tensor, move: Any, engine: Any) -> torch.Tensor:
        """The local shard of a weight where `move` brings it.

        Args:
            memory: The `Memory` of the weight.
            part: The local shard that this rank stores.
            move: How it is brought there, a `Redistribution`.
            engine: Runs that.
        """
        stored = move.as_in_memory(part)
        place = (part.data_ptr(), tuple(stored.shape), stored.stride(), part.dtype)
        writes = (memory.writes, torch_compat.version_of(part))
        key = (id(memory), writes, place, move.target)
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
            held: torch.Tensor = move.as_asked(found.value)
            return held
        value: torch.Tensor = move.run(part, engine)
        entry = _Entry(move.as_in_memory(value), (memory, part))
        if entry.bytes <= self.size:
            self._entries[key] = entry
            self._shrink()
        return value

    @property
    def holds_steps(self) -> bool:
        """Whether weights of any size are held until the step ends."""
        return self.size == inf

    def clear(self) -> None:
        """Drop all of them."""
        self._entries.clear()

    def _shrink(self) -> None:
        held = sum(each.bytes for each in self._entries.values())
        for key in list(self._entries):
            if held <= self.size:
                return
            held -= self._entries.pop(key).bytes
