"""Sharded tensors as plain slices and explicit collectives, without `torch.distributed.tensor`."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import torch

from shardcore.adapters.gradient_buckets import Buckets
from shardcore.adapters.slices import operators  # noqa: F401 - a slice is run by them
from shardcore.adapters.slices.buckets import bring, buckets
from shardcore.adapters.slices.tensor import (
    Memory,
    Slice,
    cut,
    in_layout,
    settled,
    whole,
    without_pending,
)
from shardcore.adapters.slices.writes import brought
from shardcore.adapters.threads import communicating
from shardcore.domain.errors import StrategyError
from shardcore.domain.layout import Layout
from shardcore.ports.world import World

# How long what was gathered lives: for one operator, or until the variable is written.
PER_USE, PER_STEP = "per_use", "per_step"


@attrs.frozen
class SlicedTensors:
    """The port `ShardedTensors` over one mesh.

    Args:
        world: The mesh and the processes under it.
        gathered: How long the whole value of a split variable lives: "per_use" or "per_step".
    """

    world: World
    gathered: str = attrs.field(default=PER_USE)
    _kept: "weakref.WeakSet[Memory]" = attrs.field(
        factory=weakref.WeakSet, init=False, repr=False, eq=False
    )
    _buckets: Buckets = attrs.field(init=False, repr=False, eq=False)

    @_buckets.default
    def _make_buckets(self) -> Buckets:
        return buckets(self.world)

    @gathered.validator
    def _check_gathered(self, _attribute: Any, value: str) -> None:
        if value not in (PER_USE, PER_STEP):
            raise StrategyError(
                f'Strategy "manual" has gathered="{PER_USE}" and "{PER_STEP}", got {value!r}.'
            )

    def owns(self, tensor: Any) -> bool:
        """Whether `tensor` is a slice over this mesh."""
        return isinstance(tensor, Slice) and tensor.world == self.world

    def layout(self, tensor: Any) -> Layout | None:
        """The layout of `tensor`, or None if it is plain."""
        return tensor.mesh_layout if self.owns(tensor) else None

    def shard(self, value: torch.Tensor, layout: Layout) -> Any:
        """This rank's part of `value`, copied so that the whole can be freed."""
        return _relaid(value, layout, self.world)

    def keep(self, tensor: Any) -> Any:
        """`tensor`: a slice that a variable keeps is known by being a parameter."""
        return tensor

    def join(self, part: torch.Tensor, layout: Layout, shape: tuple[int, ...]) -> Any:
        """The tensor of global `shape` of which this rank brings `part`."""
        expected = layout.local_shape(shape, self.world.position)
        assert tuple(part.shape) == expected, f"{tuple(part.shape)} is not {expected} of {layout}"
        return _joined(part, layout, shape, self.world)

    def redistribute(self, tensor: Any, layout: Layout) -> Any:
        """`tensor` in `layout`, differentiable."""
        return tensor if tensor.mesh_layout == layout else _relaid(tensor, layout, self.world)

    def settle(self, tensor: Any) -> Any:
        """`tensor` with pending reductions done, in the forward and in the backward pass."""
        if not self.owns(tensor):
            return tensor
        done = self.redistribute(tensor, without_pending(tensor.mesh_layout))
        if done.requires_grad and done.grad_fn is not None:
            done.register_hook(_settled)
        return done

    def whole(self, tensor: Any) -> torch.Tensor:
        """The whole value, gathered if need be."""
        detached = tensor.detach()
        return whole(detached) if isinstance(detached, Slice) else detached

    def local(self, tensor: Any) -> torch.Tensor:
        """What this rank stores; it shares the memory of `tensor`, and is differentiable."""
        local: torch.Tensor = _local(tensor) if isinstance(tensor, Slice) else tensor
        return local

    def copy_into(self, stored: Any, value: Any) -> None:
        """Overwrite `stored` in place."""
        with torch.no_grad():
            stored.part.copy_(brought(value, stored))
            stored.memory.written()

    def on_gradient(self, stored: torch.Tensor, layout: Layout) -> None:
        """Bring each gradient into `layout`, by the end of the backward pass."""

        def accumulated(parameter: torch.Tensor) -> None:
            bring(parameter, layout, self._buckets)

        if self.gathered == PER_STEP and isinstance(stored, Slice):
            stored.memory.keeps_whole = True
            self._kept.add(stored.memory)
        stored.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]

    def promotion(self, visiting: bool = False) -> AbstractContextManager[None]:
        """A slice takes plain tensors everywhere: it is entered for its collectives only."""
        return nullcontext() if visiting else self._scope()

    @contextmanager
    def _scope(self) -> Iterator[None]:
        """The backward pass runs here: that of CUDA tensors else runs on threads of its own."""
        try:
            with communicating(), torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            for memory in self._kept:
                memory.whole = None

    def presence(self) -> AbstractContextManager[None]:
        """Nothing to enter."""
        return nullcontext()


def _settled(gradient: torch.Tensor) -> torch.Tensor:
    return settled(gradient) if isinstance(gradient, Slice) else gradient


class _Relaid(torch.autograd.Function):
    """A tensor in another layout. The gradient comes back in the layout that it had."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, layout: Layout, world: World) -> Any:
        context.source = tensor.mesh_layout if isinstance(tensor, Slice) else None
        if isinstance(tensor, Slice):
            return in_layout(tensor, layout)
        shape = tuple(tensor.shape)
        part = cut(tensor.detach(), layout, world)
        return Slice(part.clone(memory_format=torch.contiguous_format), layout, shape, world)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        source = context.source
        if not isinstance(gradient, Slice):
            return gradient, None, None
        if source is None:
            return whole(gradient), None, None
        return in_layout(gradient, without_pending(source)), None, None


class _Joined(torch.autograd.Function):
    """A rank's part as a slice; it gets its part of the gradient."""

    @staticmethod
    def forward(
        context: Any, part: torch.Tensor, layout: Layout, shape: tuple[int, ...], world: World
    ) -> Any:
        context.layout = without_pending(layout)
        context.world = world
        return Slice(part.contiguous(), layout, shape, world)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        if isinstance(gradient, Slice):
            part = in_layout(gradient, context.layout).part
        else:
            part = cut(gradient, context.layout, context.world)
        return part, None, None, None


class _Local(torch.autograd.Function):
    """What this rank stores of a slice."""

    @staticmethod
    def forward(context: Any, tensor: Slice) -> Any:
        context.like = tensor.mesh_layout, tuple(tensor.shape), tensor.world
        return tensor.to_local()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        layout, shape, world = context.like
        return Slice(gradient, without_pending(layout), shape, world)


# The stubs of torch do not type `apply`.
_relaid: Callable[..., Any] = _Relaid.apply
_joined: Callable[..., Any] = _Joined.apply
_local: Callable[..., Any] = _Local.apply
