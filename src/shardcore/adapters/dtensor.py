"""Sharded tensors by `torch.distributed.tensor`."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, cast

import attrs
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from shardcore.adapters import (
    dtensor_gradients,
    dtensor_promotion,
    dtensor_views,
    dtensor_weights,
)
from shardcore.adapters.dtensor_operators import OPERATORS
from shardcore.adapters.dtensor_placements import from_torch, settled, to_torch
from shardcore.adapters.gradient_buckets import Buckets
from shardcore.adapters.torch_compat import dtensor as dtensor_compat
from shardcore.domain.errors import LayoutError
from shardcore.domain.layout import Layout
from shardcore.ports.world import World


@lru_cache(maxsize=64)
def device_mesh(world: World) -> DeviceMesh:
    """The torch mesh of `world`. Made once: every new one makes process groups."""
    ranks = torch.tensor(world.processes).reshape(world.mesh.shape)
    return DeviceMesh(world.device_type, ranks, mesh_dim_names=world.mesh.axis_names)


def torch_placements(layout: Layout) -> tuple[Placement, ...]:
    """The DTensor placements of `layout`."""
    placements = tuple(to_torch(placement) for placement in layout.placements)
    return dtensor_compat.ordered_placements(placements, layout.shard_order, layout.mesh)


def layout_of(world: World, tensor: DTensor) -> Layout:
    """The layout of `tensor`.

    Raises:
        LayoutError: If a reshape has left it in strides that no layout says.
    """
    try:
        placements, order = dtensor_compat.plain_placements(tensor, world.mesh)
    except ValueError as error:
        raise LayoutError(
            f"A tensor of shape {tuple(tensor.shape)} lies as {tensor.placements}, which no layout "
            "says: shardcore.distribute_tensor(tensor, layout) brings it into one."
        ) from error
    return Layout.from_placements(
        world.mesh, [from_torch(placement) for placement in placements], tensor.ndim, order
    )


@attrs.frozen
class DTensors:
    """The port `ShardedTensors` over one mesh.

    Args:
        world: The mesh and the processes under it.
    """

    world: World
    _buckets: Buckets = attrs.field(
        factory=lambda: Buckets(dtensor_gradients.start), init=False, repr=False, eq=False
    )

    @property
    def _mesh(self) -> DeviceMesh:
        return device_mesh(self.world)

    def owns(self, tensor: Any) -> bool:
        """Whether `tensor` is a DTensor of this mesh."""
        return isinstance(tensor, DTensor) and tensor.device_mesh == self._mesh

    def layout(self, tensor: Any) -> Layout | None:
        """The layout of `tensor`, or None if it is no DTensor of this mesh."""
        return layout_of(self.world, tensor) if self.owns(tensor) else None

    def shard(self, value: torch.Tensor, layout: Layout) -> DTensor:
        """This rank's part of `value`, copied so that the whole can be freed."""
        if isinstance(value, DTensor):
            return self.redistribute(value, layout)
        shape = tuple(value.shape)
        _check_order(layout, shape)
        part = value[layout.slices(shape, self.world.position)]
        if layout.is_replicated:
            return self.join(part, layout, shape)
        return self.join(part.clone(memory_format=torch.contiguous_format), layout, shape)

    def keep(self, tensor: Any) -> Any:
        """`tensor`, known by its memory: a split weight is gathered to be used."""
        return dtensor_weights.keep(tensor) if isinstance(tensor, DTensor) else tensor

    def join(self, part: torch.Tensor, layout: Layout, shape: tuple[int, ...]) -> DTensor:
        """The DTensor of global `shape`, which is given since ranks may hold unequal parts."""
        expected = layout.local_shape(shape, self.world.position)
        assert tuple(part.shape) == expected, f"{tuple(part.shape)} is not {expected} of {layout}"
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part.contiguous(),
            self._mesh,
            torch_placements(layout),
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )

    def redistribute(self, tensor: DTensor, layout: Layout) -> DTensor:
        """`tensor` in `layout`, differentiable."""
        _check_order(layout, tuple(tensor.shape))
        return tensor.redistribute(self._mesh, torch_placements(layout))

    def settle(self, tensor: Any) -> Any:
        """`tensor` with pending reductions done, in the forward and in the backward pass."""
        if not isinstance(tensor, DTensor):
            return tensor
        reduced = settled(tensor)
        if reduced.grad_fn is not None and (_is_chosen(tensor) or not _is_of_variables(reduced)):
            reduced.register_hook(settled)
        return reduced

    def whole(self, tensor: Any) -> torch.Tensor:
        """The whole value, gathered if need be.

        Raises:
            StrategyError: If it needs a collective, and this thread may not start one.
        """
        detached: Any = tensor.detach()
        if not isinstance(detached, DTensor):
            return cast(torch.Tensor, detached)
        if all(isinstance(placement, Replicate) for placement in detached.placements):
            return detached.to_local()
        return detached.full_tensor()

    def local(self, tensor: Any) -> torch.Tensor:
        """What this rank stores; it shares the memory of `tensor`, and is differentiable."""
        local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local

    def copy_into(self, stored: DTensor, value: Any) -> None:
        """Overwrite `stored` in place."""
        layout = layout_of(self.world, stored)
        with torch.no_grad():
            if isinstance(value, DTensor):
                part = self.local(self.redistribute(value, layout))
            else:
                part = value[layout.slices(tuple(stored.shape), self.world.position)]
            self.local(stored).copy_(part)
            dtensor_views.spread(stored)

    def on_gradient(self, stored: torch.Tensor, layout: Layout) -> None:
        """Bring each gradient there once it is accumulated; sums go together, in buckets."""
        placements = torch_placements(layout)

        def bring(parameter: torch.Tensor) -> None:
            dtensor_gradients.bring(parameter, placements, self._buckets)

        stored.register_hook(dtensor_gradients.contiguous)  # type: ignore[no-untyped-call]
        stored.register_post_accumulate_grad_hook(bring)  # type: ignore[no-untyped-call]

    def promotion(self, visiting: bool = False) -> AbstractContextManager[None]:
        """Promote plain tensors to replicated ones, on this thread."""
        return dtensor_promotion.promotion(visiting)

    @contextmanager
    def presence(self) -> Iterator[None]:
        """Run operators that have no rule, or a wrong one, on every thread."""
        OPERATORS.enter()
        dtensor_promotion.EVERY_THREAD.enter()
        try:
            yield
        finally:
            dtensor_promotion.EVERY_THREAD.leave()
            OPERATORS.leave()


def _is_of_variables(output: DTensor) -> bool:
    """Whether no rows of a batch are in `output`: its gradient is that of some variables.

    Those are summed together, in buckets.
    """
    return all(isinstance(placement, Replicate) for placement in output.placements)


def _is_chosen(output: DTensor) -> bool:
    """Whether `output` is a pending maximum or the like: its gradient cannot be a pending sum."""
    return any(p.is_partial() and not p.is_partial("sum") for p in output.placements)


def _check_order(layout: Layout, shape: tuple[int, ...]) -> None:
    """Refuse what `_StridedShard` would place elsewhere than `Layout.slices` says.

    torch 2.13: a dim that is split by several axes in another order than that of the mesh axes,
    and that they do not divide, is cut by another rule.
    """
    for dim, axes in layout.shard_order:
        parts = math.prod(layout.mesh.axis_size(axis) for axis in axes)
        if shape[dim] % parts:
            raise LayoutError(
                f"Layout {layout} splits dim {dim} of shape {shape} by {axes}, which is not the "
                f"order of the mesh axes {layout.mesh.axis_names}: DTensor can do that only where "
                f"{parts} divides {shape[dim]}. Name the axes in mesh order, or pad the dim."
            )
