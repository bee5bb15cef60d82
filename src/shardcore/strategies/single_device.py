"""Strategy `single`: one device holds everything whole."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs

from shardcore.domain.errors import StrategyError
from shardcore.domain.layout import Layout
from shardcore.ports.strategy import NewVariable
from shardcore.ports.world import World


@attrs.frozen
class SingleDeviceStrategy:
    """The life of a variable on one device: every layout is the whole tensor.

    Raises:
        StrategyError: If it is opened on a mesh of several ranks.
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
        """Returns the layout that the distribution gives."""
        return variable.layout

    def create(self, value: Any, storage: Layout) -> Any:
        """Returns the value itself."""
        return value

    def track(self, stored: Any, storage: Layout) -> None:
        """Does nothing: a gradient is whole."""

    def assign(self, stored: Any, value: Any) -> None:
        """Overwrites `stored` in place."""
        stored.copy_(value)

    def join(self, part: Any, layout: Layout, shape: tuple[int, ...]) -> Any:
        """Returns the part, which is the full tensor."""
        return part

    def activation(self, tensor: Any, layout: Layout | None) -> Any:
        """Returns the activation itself."""
        return tensor

    def whole(self, tensor: Any) -> Any:
        """Returns the tensor itself, detached."""
        return tensor.detach()

    def local(self, tensor: Any) -> Any:
        """Returns the tensor itself."""
        return tensor

    def owns(self, tensor: Any) -> bool:
        """Returns False: every tensor is plain."""
        return False

    def layout(self, tensor: Any) -> Layout | None:
        """Returns None: every tensor is plain."""
        return None

    def scope(self, visiting: bool = False) -> AbstractContextManager[None]:
        """Returns a scope that changes nothing."""
        return nullcontext()
