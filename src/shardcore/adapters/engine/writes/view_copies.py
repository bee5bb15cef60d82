"""Views with memory of their own: what is written reaches the base, and every view of it."""

from collections.abc import Callable
from typing import Any

import attrs
import torch

from shardcore.adapters.engine.moves.redistribution import full, local_shard, reduced
from shardcore.adapters.engine.tensor import Copied


def note_view(
    view: Any, base: Any, take: Callable[[torch.Tensor], torch.Tensor], *, is_copy: bool
) -> None:
    """Note that `view` is one of `base`.

    Args:
        view: A sharded tensor that must show what is in `base`.
        base: The tensor that it is a view of; it may be such a view itself.
        take: Takes the same view of the full value of `base`.
        is_copy: Whether the local shards of both do not share their memory.
    """
    before = base.copied
    if before is not None:
        first = before.take
        view.copied = attrs.evolve(before, take=lambda tensor: take(first(tensor)))
    elif is_copy:
        # A base may change its shape in place: its views then stay views of the old shape, which
        # this copy of it keeps. A pending base has no such copy: it would be reduced twice.
        if base.is_pending:
            base.memory.is_viewed = True
        else:
            base = base.engine.wrap(base.part, base.form, base.memory)
        view.copied = Copied(base, take, base.memory.writes)


def refresh(view: Any) -> None:
    """Bring a view that is a copy up to date, if its base was written since. A collective."""
    copied = view.copied
    if copied is None or copied.base.memory.writes == copied.writes:
        return
    _store(view, copied, copied.take(full(copied.base)))


def write_through(view: Any, write: Callable[[torch.Tensor], Any]) -> None:
    """Write into a view that is a copy: its base gets the values too.

    Args:
        view: The view.
        write: Writes into the full value of the view.
    """
    copied = view.copied
    assert copied is not None, "it shares the memory of its base"
    reduce_in_place(copied.base)
    base = copied.base
    value = full(base).clone(memory_format=torch.contiguous_format)
    written = copied.take(value)
    write(written)
    base.part.copy_(local_shard(value, base.form.layout, base.engine))
    base.memory.written()
    _store(view, copied, written)


def _store(view: Any, copied: Copied, value: torch.Tensor) -> None:
    """Give `view` a local shard of its own: that of a pending base is not to be overwritten."""
    _become_reduced(view)
    part = local_shard(value, view.form.layout, view.engine)
    view.part = part.clone(memory_format=torch.contiguous_format)
    view.copied = attrs.evolve(copied, writes=copied.base.memory.writes)


def reduce_in_place(target: Any) -> None:
    """Do the pending reductions of `target`."""
    if target.is_pending:
        done = reduced(target)
        target.part.copy_(done.part)
        target.memory.written()
        _become_reduced(target)


def _become_reduced(target: Any) -> None:
    layout = target.form.layout
    target.form = target.engine.evolved(target.form, layout=layout.reduced)
