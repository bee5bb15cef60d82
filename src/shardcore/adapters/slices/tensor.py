"""A tensor of which this rank has a slice: a plain tensor, with the layout of the whole."""

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.slices.moves import moved
from shardcore.domain.layout import Layout
from shardcore.domain.placements import Partial, Placement, Replicate
from shardcore.ports.world import World


@attrs.define(eq=False)
class Memory:
    """What slices that are views of each other share.

    Args:
        writes: The number of writes into it, which torch 2.13 does not count below a subclass.
        keeps_whole: Whether the whole value is kept, once it was gathered.
        whole: The whole value, as long as it is kept.
    """

    writes: int = 0
    keeps_whole: bool = False
    whole: torch.Tensor | None = None

    def written(self) -> None:
        """Count a write, after which the whole value is that of before."""
        self.writes += 1
        self.whole = None


class Slice(torch.Tensor):
    """This rank's part of a tensor that lies over a mesh.

    To torch it has the global shape, so that autograd and models take it for the whole; all
    operators on it are run by `slices.operators`.

    `part`, `to_local()` and `full_tensor()` are what a DTensor has under the latter names.

    Args:
        part: What this rank stores, a plain tensor.
        layout: The layout of the whole.
        shape: Its global shape.
        world: The mesh over the processes.
        kept: Whether it is made of what a variable keeps alone. Beside an activation it is made
            whole, for one operator, rather than the activation be moved.
        strides: Those that the whole would have on one device, for a view. By default there are no
            gaps in memory, and `part` is copied if it has some. Ranks agree on them, which they
            would not if each looked at its own part: a size may be 1 or 0 there.

        memory: That of the tensor of which this is a view; by default its own.

    Attributes:
        part: As given.
        mesh_layout: The layout; `layout` is taken by torch for another thing.
        world: As given.
        memory: As given.
        run: Runs an operator on slices; set by `slices.operators`.
        copied: For a view that is a copy: of what.
    """

    part: torch.Tensor
    mesh_layout: Layout
    world: World
    run: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    memory: Memory
    copied: "Copied | None"
    _made_of_kept: bool

    @staticmethod
    def __new__(
        cls,
        part: torch.Tensor,
        layout: Layout,
        shape: tuple[int, ...],
        world: World,
        kept: bool = False,
        strides: tuple[int, ...] | None = None,
        memory: Memory | None = None,
    ) -> "Slice":
        """A slice of a tensor of global `shape`."""
        if strides is None:
            part, strides = part.contiguous(), torch.empty(shape, device="meta").stride()
        self: Slice = torch_compat.wrapper(cls, shape, strides, part)
        self.part, self.mesh_layout, self.world = part, layout, world
        self.memory, self.copied, self._made_of_kept = memory or Memory(), None, kept
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape, content = tuple(self.shape), tensor_contents or self.part
        return f"Slice({content!r}, shape={shape}, layout={self.mesh_layout})"

    __torch_function__ = torch_compat.NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.run(func, args, kwargs or {})

    def to_local(self) -> torch.Tensor:
        """What this rank stores, without a word to autograd."""
        return self._current().part

    def full_tensor(self) -> torch.Tensor:
        """The whole, without a word to autograd. All ranks call it together."""
        return whole(self._current())

    def numpy(self, *, force: bool = False) -> Any:
        """The whole as an array. All ranks call it together."""
        return whole(self._current()).numpy(force=force)

    def tolist(self) -> Any:
        """The whole as a nest of lists. All ranks call it together."""
        return whole(self._current()).tolist()

    def _current(self) -> "Slice":
        """Itself; a view that is a copy is brought up to date, as before every operator."""
        if self.copied is not None:
            self.detach()
        return self

    @property
    def kept(self) -> bool:
        """Whether it is what a variable keeps, or made of such alone."""
        return self._made_of_kept or isinstance(self, torch.nn.Parameter)

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the part begins in the whole."""
        return self.mesh_layout.global_offset(tuple(self.shape), self.world.position)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """What each mesh axis does to it."""
        return self.mesh_layout.placements

    @property
    def is_whole(self) -> bool:
        """Whether the part is all there is."""
        return is_whole(self.mesh_layout)

    @property
    def is_pending(self) -> bool:
        """Whether the parts of several ranks have to be reduced."""
        mesh = self.world.mesh
        return any(mesh.axis_size(axis) > 1 for axis, _ in self.mesh_layout.partial)


@attrs.frozen(eq=False)
class Copied:
    """Of what a view is a copy.

    Args:
        base: The slice that it is a view of, which has its memory, or shares that of others.
        way: Takes the view of the whole of `base`.
        writes: The writes into the memory of `base` that the view has seen.
    """

    base: Slice
    way: Callable[[torch.Tensor], torch.Tensor]
    writes: int


def is_whole(layout: Layout) -> bool:
    """Whether each rank has all of a tensor in `layout`."""
    return all(
        size == 1 or isinstance(placement, Replicate)
        for size, placement in zip(layout.mesh.shape, layout.placements, strict=True)
    )


def without_pending(layout: Layout) -> Layout:
    """`layout` with every pending reduction done."""
    return Layout(layout.mesh, layout.spec) if layout.partial else layout


def in_layout(tensor: Slice, layout: Layout) -> Slice:
    """`tensor` in another layout, of which the first rank has all where a sum is newly pending."""
    if tensor.mesh_layout == layout:
        return tensor
    shape = tuple(tensor.shape)
    have = tensor.mesh_layout.placement
    new = [axis for axis, op in layout.partial if have(axis) != Partial(op)]
    pending = tuple(each for each in layout.partial if each[0] not in new)
    settled_first = Layout(layout.mesh, layout.spec, pending)
    part = moved(tensor.part, tensor.mesh_layout, settled_first, shape, tensor.world)
    if any(_position(tensor.world, axis) for axis in new):
        part = torch.zeros_like(part)
    return Slice(part, layout, shape, tensor.world)


def _position(world: World, axis: str) -> int:
    """Where this rank stands along `axis`."""
    return world.mesh.coordinate(world.position)[world.mesh.axis_index(axis)]


def gathered(tensor: Slice) -> Slice:
    """`tensor` whole on every rank, for a use of what a variable keeps."""
    memory = tensor.memory
    layout = Layout.replicated(tensor.world.mesh, tensor.ndim)
    if not memory.keeps_whole or tensor.is_whole:
        return in_layout(tensor, layout)
    base = torch_compat.base_of(tensor)
    if memory.whole is None:
        memory.whole = whole(base if isinstance(base, Slice) else tensor)
    value = memory.whole if base is None else torch_compat.same_view(tensor, memory.whole)
    return Slice(value, layout, tuple(tensor.shape), tensor.world)


def whole(tensor: Slice) -> torch.Tensor:
    """The whole value as a plain tensor; it may share the memory of `tensor`."""
    return in_layout(tensor, Layout.replicated(tensor.world.mesh, tensor.ndim)).part


def settled(tensor: Slice) -> Slice:
    """`tensor` with its pending reductions done."""
    return in_layout(tensor, without_pending(tensor.mesh_layout))


def replicated(value: torch.Tensor, world: World) -> Slice:
    """`value`, plain and equal on all ranks, as a slice that is whole."""
    layout = Layout.replicated(world.mesh, value.ndim)
    return Slice(value, layout, tuple(value.shape), world, strides=value.stride())


def cut(value: torch.Tensor, layout: Layout, world: World) -> torch.Tensor:
    """This rank's part of the plain `value`, sharing its memory."""
    return value[layout.slices(tuple(value.shape), world.position)]
