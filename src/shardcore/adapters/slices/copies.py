"""Views that have memory of their own: what is written reaches the base, and every view of it."""

from collections.abc import Callable
from typing import Any

import attrs
import torch

from shardcore.adapters.slices.tensor import Copied, Slice, cut, settled, whole, without_pending


def note_view(
    view: Slice, base: Slice, way: Callable[[torch.Tensor], torch.Tensor], *, is_copy: bool
) -> None:
    """Note that `view` is one of `base`.

    Args:
        view: A slice that shall show what is in `base`.
        base: What it is a view of; it may be such a view itself.
        way: Takes the same view of the whole of `base`.
        is_copy: Whether the parts of both do not share their memory.
    """
    before = base.copied
    if before is not None:
        first = before.way
        view.copied = attrs.evolve(before, way=lambda tensor: way(first(tensor)))
    elif is_copy:
        view.copied = Copied(base, way, base.memory.writes)


def refresh(view: Slice) -> None:
    """Bring a view that is a copy up to date, if its base was written since. A collective."""
    copied = view.copied
    if copied is None or copied.base.memory.writes == copied.writes:
        return
    _take(view, copied, copied.way(whole(copied.base)))


def write_through(view: Slice, write: Callable[[torch.Tensor], Any]) -> None:
    """Write into a view that is a copy: its base gets the values too.

    Args:
        view: The view.
        write: Writes into the whole of it.
    """
    copied = view.copied
    assert copied is not None, "it shares the memory of its base"
    settle(copied.base)
    base = copied.base
    value = whole(base).clone(memory_format=torch.contiguous_format)
    written = copied.way(value)
    write(written)
    base.part.copy_(cut(value, base.mesh_layout, base.world))
    base.memory.written()
    _take(view, copied, written)


def _take(view: Slice, copied: Copied, value: torch.Tensor) -> None:
    view.mesh_layout = without_pending(view.mesh_layout)
    view.part.copy_(cut(value, view.mesh_layout, view.world))
    view.copied = attrs.evolve(copied, writes=copied.base.memory.writes)


def settle(target: Slice) -> None:
    """Do what is pending in `target`, in place."""
    if target.is_pending:
        done = settled(target)
        target.part.copy_(done.part)
        target.memory.written()
        target.mesh_layout = done.mesh_layout
