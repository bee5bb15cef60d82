"""Sharded tensors: this rank's local shard, and the layout of the full tensor."""

import copy
from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs
import torch

from shardcore.adapters.ranks.job import exchange
from shardcore.domain.errors import ShardedTensorError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.memory_order import contiguous_strides
from shardcore.domain.layouts.placements import Replicate


@attrs.frozen(eq=False, slots=False)
class Form:
    """The metadata of a sharded tensor: all but its values.

    An engine has one object for each combination of fields, so forms are compared by identity.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # the strides of the full tensor on one device, equal on all ranks
    layout: Layout
    dtype: torch.dtype
    device: torch.device  # the device of the local shard
    # Whether it is the value of a variable, or computed from such values alone.
    weight: bool = False

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every rank has the full tensor."""
        mesh = self.layout.mesh
        return all(
            size == 1 or isinstance(placement, Replicate)
            for size, placement in zip(mesh.shape, self.layout.placements, strict=True)
        )

    @cached_property
    def is_pending(self) -> bool:
        """Whether the local shards of several ranks have to be reduced."""
        mesh = self.layout.mesh
        return any(mesh.axis_size(axis) > 1 for axis, _ in self.layout.partial)

    @cached_property
    def has_placements(self) -> bool:
        """Whether placements alone define the layout: no blocks, axes in mesh order."""
        return all(block == 1 for block in self.layout.blocks) and self.layout.in_mesh_order

    @cached_property
    def repeats(self) -> tuple[int, ...]:
        """The dims along which its values are equal, since it was expanded."""
        sizes = enumerate(zip(self.shape, self.strides, strict=True))
        return tuple(dim for dim, (size, stride) in sizes if size > 1 and stride == 0)

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the full tensor is contiguous."""
        return self.strides == contiguous_strides(self.shape)


def is_dense(tensor: torch.Tensor) -> bool:
    """Finds tensors that may be sharded: sparse and nested ones are plain, on all ranks."""
    return tensor.layout is torch.strided and not tensor.is_nested


@attrs.define(eq=False)
class Memory:
    """The state that a sharded tensor and its views share."""

    # The number of writes into it, which torch does not count below a subclass; each makes copies
    # of the values stale.
    writes: int = 0
    # Redistributed copies of the values, if any; see `redistribution.note_copy`.
    redistributed: "dict[Any, Any] | None" = None
    is_viewed: bool = False  # whether the tensor got views while it was partial, which are copies


if TYPE_CHECKING:
    _Base = torch.Tensor
else:  # isinstance takes half of the time for a plain class; the tensor classes add torch.Tensor
    _Base = object


class ShardedTensor(_Base):
    """The base of the tensor classes of all strategies.

    For torch such a tensor has the global shape, so that autograd and models treat it as the full
    tensor; `dispatch` runs all operators on it.
    """

    part: torch.Tensor  # the local shard, a plain tensor
    form: Form

    engine: Any  # an `Engine`, which makes such tensors
    memory: Memory  # shared with the tensor of which this is a view
    copied: "Copied | None"  # for a view that is a copy, its origin

    @property
    def mesh_layout(self) -> Layout:
        """The layout on the mesh, which `torch.Tensor.layout` does not describe."""
        return self.form.layout

    @property
    def viewed_tensor(self) -> "ShardedTensor | None":
        """The tensor of which this is a view, if the view has separate memory; else None."""
        return None if self.copied is None else self.copied.base

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        """Copies into new memory, over the same mesh, for `copy.deepcopy`."""
        if id(self) not in memo:
            if not self.is_leaf:
                raise ShardedTensorError(
                    f"A tensor of shape {self.form.shape} that was computed with gradients cannot "
                    "be copied by copy.deepcopy, as in torch: copy detach() of it."
                )
            copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
            if self.grad is not None:
                copied.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def meet_to_read(self) -> None:
        """Waits until all ranks read this tensor, unless each rank has all of it.

        Raises:
            RankMismatchError: If another rank does something else.
        """
        if not self.form.is_replicated and exchange.is_main_thread():
            layout = self.form.layout
            exchange.gather(None, f"the reading of a tensor of shape {self.form.shape}, {layout}")

    @abstractmethod
    def full_tensor(self) -> torch.Tensor:
        """All-gathers the full tensor as a plain one. All ranks call it together."""

    @abstractmethod
    def to_local(self) -> torch.Tensor:
        """Takes the local shard."""


@attrs.frozen(eq=False)
class Copied:
    """The origin of a view that is a copy."""

    base: Any  # the tensor of which it is a view
    # A function that takes the view of the full value of `base`.
    take: Callable[[torch.Tensor], torch.Tensor]
    writes: int  # the writes into the memory of `base` that the view has seen
