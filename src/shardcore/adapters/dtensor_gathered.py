"""Weights that were gathered lately, to be used again by the next steps of a recurrence."""

from collections.abc import Hashable
from typing import Any, cast

import attrs
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from shardcore.adapters import threads
from shardcore.adapters.torch_compat import dtensor as dtensor_compat

# Beside a bucket of gradients it is no matter; and the weights of most recurrent cells fit in.
KEPT_BYTES = 25 * 1024 * 1024


@attrs.frozen
class _Entry:
    """A gathered weight.

    Args:
        source: What it was gathered from: as long as it is held, its memory is nobody else's.
        whole: The gathered one.
    """

    source: DTensor
    whole: DTensor

    @property
    def bytes(self) -> int:
        """The bytes of the whole, which are the same on all ranks."""
        return self.whole.numel() * self.whole.element_size()


@attrs.define
class Gathered:
    """The weights that were gathered last, as many as fit in `size` bytes.

    What it holds hangs on the order of uses and on sizes, never on when memory is freed: all ranks
    hold the same, so that all or none communicate.

    Args:
        size: The bytes of the gathered weights that are held.
    """

    size: int = KEPT_BYTES
    _entries: dict[Hashable, _Entry] = attrs.field(factory=dict, init=False)

    def along(self, weight: DTensor, axes: set[int]) -> DTensor:
        """`weight`, whole along `axes`. It is not to be written into."""
        placements = tuple(
            Replicate() if axis in axes else placement
            for axis, placement in enumerate(weight.placements)
        )
        part = dtensor_compat.local_tensor(weight)
        if not threads.may_communicate() or part.is_inference():
            return _brought(weight, placements)
        key = _state(weight, part), placements
        entry = self._entries.pop(key, None) or _Entry(
            cast(DTensor, weight.detach()), _brought(weight, placements)
        )
        self._entries[key] = entry
        self._make_room()
        return entry.whole

    def written(self, memory: torch.UntypedStorage) -> None:
        """Drop what was gathered from `memory`, into which somebody has written."""
        if not self._entries:
            return
        self._entries = {
            key: each
            for key, each in self._entries.items()
            if dtensor_compat.local_tensor(each.source).untyped_storage() is not memory
        }

    def clear(self) -> None:
        """Hold nothing."""
        self._entries.clear()

    def _make_room(self) -> None:
        held = sum(each.bytes for each in self._entries.values())
        for key in list(self._entries):
            if held <= self.size:
                return
            held -= self._entries.pop(key).bytes


def _state(weight: DTensor, part: torch.Tensor) -> Hashable:
    """Where `weight` lies, and how often that was written into."""
    memory = part.untyped_storage(), part.storage_offset(), dtensor_compat.writes_into(part)
    place = tuple(weight.shape), tuple(weight.placements), weight.device_mesh
    return memory, tuple(part.shape), part.stride(), part.dtype, place


def _brought(weight: DTensor, placements: Any) -> DTensor:
    with torch.no_grad():
        return weight.redistribute(placements=placements)


GATHERED = Gathered()
