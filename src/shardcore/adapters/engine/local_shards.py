"""The tensor class of strategy `manual`, which imports nothing of `torch.distributed.tensor`."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardcore.adapters import torch_private
from shardcore.adapters.engine import dispatch
from shardcore.adapters.engine.autograd import full_tensor, to_local
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.host_access import HostAccess
from shardcore.adapters.engine.tensor import Form
from shardcore.adapters.torch_private import Args, Kwargs, Operator
from shardcore.domain.layouts.placements import Placement
from shardcore.ports.world import World


class LocalShardTensor(HostAccess, torch.Tensor):
    """A sharded tensor that is no DTensor: its layout may be finer than placements allow."""

    __torch_function__ = torch_private.NO_TORCH_FUNCTION

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        shape, content = tuple(self.shape), tensor_contents or self.part
        text = f"LocalShardTensor({content!r}, shape={shape}, layout={self.mesh_layout})"
        return text + self.remark()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operator, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        return dispatch.run(func, args, kwargs or {})

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement along each mesh axis."""
        return self.form.layout.placements

    def to_local(self) -> torch.Tensor:
        """Takes the local shard, sharing the memory of this tensor; differentiable."""
        return to_local(self)

    def full_tensor(self) -> torch.Tensor:
        """All-gathers a plain tensor; differentiable. All ranks call it together."""
        return full_tensor(self)


class LocalShards:
    """The tensor classes of strategy `manual`."""

    def __init__(self) -> None:
        torch_private.find_dtensor()

    @classmethod
    def over(cls, _world: World, _groups: "Mapping[str, dist.ProcessGroup]") -> "LocalShards":
        """Ignores mesh and groups: the classes are the same over every mesh."""
        return cls()

    def kind(self, _form: Form) -> type[torch.Tensor]:
        """Chooses one class for all forms."""
        return LocalShardTensor

    def adopt(self, engine: Engine, tensor: torch.Tensor) -> None:
        """Adopts none: every other tensor is plain."""
