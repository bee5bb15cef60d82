"""Strategy `single`: one device stores every full tensor."""

from contextlib import AbstractContextManager, nullcontext
from typing import Generic

import attrs

from shardcore.domain.errors import StrategyError
from shardcore.domain.layouts.layout import Layout
from shardcore.ports.strategy import NewVariable
from shardcore.ports.types import TensorT
from shardcore.ports.world import World


@attrs.frozen
class SingleDeviceStrategy(Generic[TensorT]):
    """A strategy for one device: every local shard is the full tensor.

    Args:
        world: A mesh of one device.

    Raises:
        StrategyError: If the mesh has several ranks.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> single = SingleDeviceStrategy(World(Mesh((1,), ("data",)), (0,), 0, "cpu"))
        >>> single.layout("any tensor") is None  # plain
        True
    """

    world: World

    def __attrs_post_init__(self) -> None:
        if self.world.mesh.size != 1:
            raise StrategyError(
                f"Strategy 'single' was opened on mesh {self.world.mesh} of "
                f"{self.world.mesh.size} ranks, but it serves one device. Use "
                f'shardcore.install(strategy="dtensor"), or a mesh of one device.'
            )

    def storage(self, variable: NewVariable) -> Layout:
        """The layout that the distribution gives."""
        return variable.layout

    def create(self, value: TensorT, storage: Layout, variable: NewVariable) -> TensorT:
        """The value itself: its only shard."""
        return value

    def redistribute_gradients(self, stored: TensorT, storage: Layout) -> None:
        """Does nothing: a gradient is a full tensor."""

    def assign(self, stored: TensorT, value: TensorT) -> None:
        """Overwrites `stored` in place."""
        stored.copy_(value)

    def from_local(self, part: TensorT, layout: Layout, shape: tuple[int, ...]) -> TensorT:
        """The part itself, which is the full tensor."""
        return part

    def redistribute(self, tensor: TensorT, layout: Layout | None) -> TensorT:
        """The tensor itself: one device has nothing to move."""
        return tensor

    def full_tensor(self, tensor: TensorT) -> TensorT:
        """The tensor itself, detached."""
        return tensor.detach()

    def to_local(self, tensor: TensorT) -> TensorT:
        """The tensor itself, which is its only shard."""
        return tensor

    def owns(self, tensor: TensorT) -> bool:
        """False: every tensor is plain."""
        return False

    def layout(self, tensor: TensorT) -> Layout | None:
        """None: every tensor is plain."""
        return None

    def implicit_replication(
        self, forbid_collectives: bool = False
    ) -> AbstractContextManager[None]:
        """Opens a scope that changes nothing."""
        return nullcontext()
