"""The tensor class of strategy `dtensor`: a DTensor whose operators the engine runs."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardcore.adapters.engine import autograd
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.host_access import HostAccess
from shardcore.adapters.engine.local_shards import LocalShardTensor
from shardcore.adapters.engine.tensor import Form
from shardcore.adapters.torch_private.dtensor import DTensorSpec, GivenDTensor, TensorMeta
from shardcore.domain.errors import LayoutError
from shardcore.domain.layouts import placements as domain
from shardcore.domain.layouts.layout import Layout
from shardcore.ports.world import World


class ShardedDTensor(HostAccess, GivenDTensor):
    """A DTensor whose operators the engine runs.

    Its methods take the arguments of those of a DTensor, and return tensors of this class.
    """

    __torch_dispatch__ = LocalShardTensor.__torch_dispatch__  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        text: str = super().__repr__()  # type: ignore[no-untyped-call]
        return text + self.remark()

    @property
    def spec(self) -> DTensorSpec:  # type: ignore[override]
        """The layout, shape, strides and dtype, as DTensor describes them."""
        return cast(DTensors, self.engine.classes).spec(self.form)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Takes the local shard, sharing the memory of this tensor; differentiable."""
        return autograd.to_local(self, self._layout_of(grad_placements))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """All-gathers a plain tensor; differentiable. All ranks call it together."""
        return autograd.full_tensor(self, self._layout_of(grad_placements))

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> "ShardedDTensor":
        """Redistributes this tensor; differentiable. All ranks call it together.

        The collectives are always waited for, whatever `async_op` is. The mesh must be that of this
        tensor, and `backward_dtype` is refused.
        """
        if device_mesh not in (None, self.device_mesh):
            raise LayoutError(
                f"A tensor on {self.device_mesh} cannot be redistributed to another mesh, "
                f"{device_mesh}: all-gather it by full_tensor(), and distribute that."
            )
        layout = self._layout_of(placements)
        if layout is None or backward_dtype is not None:
            raise LayoutError(
                f"redistribute() needs placements, one per mesh axis, and takes no backward_dtype; "
                f"got placements={placements}, backward_dtype={backward_dtype} on mesh "
                f"{self.device_mesh}."
            )
        tensor = self if forward_dtype is None else self.to(forward_dtype)
        return cast(ShardedDTensor, autograd.redistribute(tensor, layout, self.engine))

    def _layout_of(self, placements: Sequence[Placement] | None) -> Layout | None:
        return None if placements is None else layout_of(self.engine.world, placements, self.ndim)


@attrs.frozen(eq=False)
class DTensors:
    """The tensor classes of strategy `dtensor`."""

    mesh: DeviceMesh  # the torch mesh
    _specs: dict[Form, DTensorSpec] = attrs.field(factory=dict, init=False)

    @classmethod
    def over(cls, world: World, groups: Mapping[str, dist.ProcessGroup]) -> "DTensors":
        """Makes a torch mesh of the process groups of the axes of `world`."""
        ranks = torch.tensor(world.processes).reshape(world.mesh.shape)
        names = world.mesh.axis_names
        of_axes = [groups[axis] for axis in names]
        return cls(DeviceMesh.from_group(of_axes, world.device_type, ranks, mesh_dim_names=names))

    def kind(self, form: Form) -> type[torch.Tensor]:
        """Chooses a DTensor if placements alone describe `form`."""
        return ShardedDTensor if form.has_placements else LocalShardTensor

    def adopt(self, engine: Engine, tensor: torch.Tensor) -> Any:
        """Converts a DTensor on this mesh to a sharded tensor, which shares its memory."""
        if not isinstance(tensor, DTensor):
            return None
        if tensor.device_mesh != self.mesh:
            raise LayoutError(
                f"A DTensor on {tensor.device_mesh} meets tensors on {self.mesh}: distribute it "
                "over the mesh of the distribution first."
            )
        layout = layout_of(engine.world, tensor.placements, tensor.ndim)
        with torch.no_grad():
            part = tensor.to_local()
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return engine.wrap(part, engine.form(shape, layout, part.dtype, part.device, strides))

    def spec(self, form: Form) -> DTensorSpec:
        """Looks up the one spec for all tensors of `form`."""
        spec = self._specs.get(form)
        if spec is None:
            meta = TensorMeta(torch.Size(form.shape), form.strides, form.dtype)
            placements = tuple(map(to_torch, form.layout.placements))
            spec = self._specs[form] = DTensorSpec(self.mesh, placements, tensor_meta=meta)
        return spec


def to_torch(placement: domain.Placement) -> Placement:
    """Converts a placement to that of DTensor."""
    match placement:
        case domain.Shard(dim):
            return Shard(dim)
        case domain.Partial(op):
            return Partial(op)
        case _:
            return Replicate()


def layout_of(world: World, placements: Sequence[Placement], ndim: int) -> Layout:
    """Converts DTensor placements, one per mesh axis, to a layout."""
    return Layout.from_placements(world.mesh, map(_from_torch, placements), ndim)


def _from_torch(placement: Placement) -> domain.Placement:
    if placement.is_shard():
        return domain.Shard(cast(Shard, placement).dim)
    if placement.is_partial():
        return domain.Partial(cast(Any, placement).reduce_op)
    if placement.is_replicate():
        return domain.Replicate()
    raise LayoutError(
        f"Expected a DTensor with placements Shard, Replicate and Partial, got {placement}: "
        "redistribute it to these first.",
        got=str(placement),
    )
