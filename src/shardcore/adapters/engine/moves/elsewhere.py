"""Activations that were brought elsewhere for a use: later uses in the same step find them.

The backward pass of an operator reads what its forward pass had gathered, and a pending sum that
several operators read is reduced once.
"""

from collections.abc import Hashable
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.domain.placements import Replicate


@attrs.frozen(eq=False)
class Elsewhere:
    """A tensor in another layout.

    Args:
        tensor: It.
        serves: Whether products are to read it in place of the shards.
        of: The shard that it was made of, kept so that no other has its id.
        stamp: What changes when either is written, or the step ends.
    """

    tensor: Any
    serves: bool
    of: torch.Tensor
    stamp: Hashable


def note(tensor: Any, found: Any, serves: bool = False) -> None:
    """Note that `found` has the values of `tensor`; one that splits less is kept in its place.

    Args:
        tensor: A sharded tensor that is no weight; those are held by `Unsharded`.
        found: The same tensor elsewhere.
        serves: Whether products are to read it in place of the shards from now on.
    """
    known = find(tensor)
    # A pending one would be taken for the sum that it is not yet.
    if (
        tensor.form.weight
        or found.form.layout.partial
        or (known is not None and splits_less(tensor, known.tensor))
    ):
        return
    memory = tensor.memory
    if memory.elsewhere is None:
        memory.elsewhere = {}
    memory.elsewhere[_place(tensor)] = Elsewhere(found, serves, tensor.part, _stamp(tensor, found))


def find(tensor: Any) -> Elsewhere | None:
    """`tensor` in another layout, None where it is in its own alone."""
    known: dict[Hashable, Elsewhere] | None = tensor.memory.elsewhere
    found = known.get(_place(tensor)) if known else None
    return found if found and found.stamp == _stamp(tensor, found.tensor) else None


def handed_out(tensor: Any, value: torch.Tensor) -> torch.Tensor:
    """The full `value` of `tensor` for the user, in memory that no operator reads later.

    NumPy may write into it, which torch does not count.
    """
    return value if find(tensor) is None else value.clone()


def _place(tensor: Any) -> Hashable:
    """A key that differs for views of one memory, and is equal for aliases of a tensor."""
    return tensor.form, id(tensor.part)


def _stamp(tensor: Any, found: Any) -> Hashable:
    return (
        tensor.engine.steps,
        tensor.memory.writes,
        torch_compat.version_of(tensor.part),
        found.memory.writes,
        torch_compat.version_of(found.part),
    )


def splits_less(tensor: Any, other: Any) -> bool:
    """Whether `other` has the layout of `tensor`, with nothing split or pending on some axes."""
    before, after = tensor.form.layout, other.form.layout
    names = before.mesh.axis_names
    moved = [axis for axis in names if before.placement(axis) != after.placement(axis)]
    return bool(moved) and all(isinstance(after.placement(axis), Replicate) for axis in moved)
