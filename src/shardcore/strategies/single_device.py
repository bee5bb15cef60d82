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
        """As the distribution says."""
        return variable.layout

    def create(self, value: Any, storage: Layout) -> Any:
        """The value itself."""
        return value

    def track(self, stored: Any, storage: Layout) -> None:
        """Nothing: a gradient is whole."""

    def assign(self, stored: Any, value: Any) -> None:
        """In place."""
        stored.copy_(value)

    def join(self, part: Any, layout: Layout, shape: tuple[int, ...]) -> Any:
        """The part is the tensor."""
        return part

    def activation(self, tensor: Any, layout: Layout | None) -> Any:
        """The activation itself."""
        return tensor

    def whole(self, tensor: Any) -> Any:
        """The tensor itself, detached."""
        return tensor.detach()

    def local(self, tensor: Any) -> Any:
        """The tensor itself."""
        return tensor

    def owns(self, tensor: Any) -> bool:
        """No: every tensor is plain."""
        return False

    def layout(self, tensor: Any) -> Layout | None:
        """None: every tensor is plain."""
        return None

    def scope(self, visiting: bool = False) -> AbstractContextManager[None]:
        """Nothing to enter."""
        return nullcontext()
