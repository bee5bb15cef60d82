"""Passes parts of a tensor on from rank to rank, around a mesh axis."""

from collections.abc import Iterator
from math import prod

import attrs
import torch

from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.moves.steps import wait
from shardcore.adapters.engine.tensor import Form
from shardcore.adapters.job.threads import check_thread
from shardcore.adapters.torch_private import collectives
from shardcore.domain.layout import Layout
from shardcore.ports.measurement.trace_context import Move, redistribution_scope


@attrs.frozen(eq=False)
class Passing:
    """The ranks along an axis, each of which sends to the next one only, the last to the first.

    Args:
        engine: The engine.
        axis: The axis.
        form: The form of the tensors whose parts are passed on.
        layout: The layout of these tensors, in which `axis` shards `dim`.
        dim: The dim, counted from the end: parts may have more dims in front.
    """

    engine: Engine
    axis: str
    form: Form
    layout: Layout
    dim: int

    @property
    def count(self) -> int:
        """The number of ranks along the axis."""
        return self.engine.world.mesh.axis_size(self.axis)

    @property
    def place(self) -> int:
        """The place of this rank along the axis."""
        return self._place_of(self.engine.world.position)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of `dim` in the part of each place."""
        dim = self.dim % self.form.ndim
        return self.layout.chunk_sizes(dim, self.form.shape[dim])

    def owner(self, hop: int) -> int:
        """Returns the place whose part this rank has after `hop` hops."""
        return (self.place - hop) % self.count

    def around(self, part: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the parts of all ranks with their places, its own first.

        The next one is under way while the caller computes.
        """
        for hop in range(self.count):
            coming = self.start(part, hop) if hop + 1 < self.count else None
            yield self.owner(hop), part
            if coming is not None:
                part = self.arrived(coming, part, hop)

    def start(self, part: torch.Tensor, hop: int) -> torch.Tensor:
        """Starts hop number `hop`, from 0, and returns what comes; see `arrived`.

        `part` is that of `owner(hop)`, and that of `owner(hop + 1)` comes.
        """
        check_thread()
        places = [self._place_of(peer) for peer in self.engine.world.peers(self.axis)]
        after, before = (self.place + 1) % self.count, (self.place - 1) % self.count
        size = prod(self._shape_of_next(part, hop))
        move = Move(part, self.form.shape, self.layout, self.layout, to_next=True)
        with redistribution_scope(move):
            return collectives.all_to_all(
                part.reshape(-1),
                [size if place == before else 0 for place in places],
                [part.numel() if place == after else 0 for place in places],
                self.engine.groups[self.axis],
            )

    def arrived(self, coming: torch.Tensor, part: torch.Tensor, hop: int) -> torch.Tensor:
        """Waits for what comes in hop number `hop`, and returns it.

        `part` is any part, for the other dims.
        """
        return wait(coming, "all_to_all").reshape(self._shape_of_next(part, hop))

    def _shape_of_next(self, part: torch.Tensor, hop: int) -> list[int]:
        shape = list(part.shape)
        shape[self.dim] = self.sizes[self.owner(hop + 1)]
        return shape

    def _place_of(self, rank: int) -> int:
        return self.engine.world.mesh.position_along([self.axis], rank)
