"""Sends parts of a tensor from rank to rank around a ring: the ranks along a mesh axis."""

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
class RingExchange:
    """A ring: each rank along an axis sends to the next one only, the last to the first.

    Args:
        engine: The engine.
        axis: The axis.
        form: The form of the tensors whose parts are sent.
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
    def coordinate(self) -> int:
        """The coordinate of this rank along the axis."""
        return self._coordinate_of(self.engine.world.position)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of `dim` in the part of each coordinate."""
        dim = self.dim % self.form.ndim
        return self.layout.chunk_sizes(dim, self.form.shape[dim])

    def owner(self, hop: int) -> int:
        """Returns the coordinate of the rank whose part is here after `hop` hops."""
        return (self.coordinate - hop) % self.count

    def rotate(self, part: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the parts of all ranks, each with the coordinate of its owner; the own one first.

        The next part is on its way while the caller computes.
        """
        for hop in range(self.count):
            incoming = self.send(part, hop) if hop + 1 < self.count else None
            yield self.owner(hop), part
            if incoming is not None:
                part = self.receive(incoming, part, hop)

    def send(self, part: torch.Tensor, hop: int) -> torch.Tensor:
        """Starts hop number `hop`, from 0, and returns the unfinished result; see `receive`.

        It sends `part`, which is that of `owner(hop)`; the result is the part of `owner(hop + 1)`.
        """
        check_thread()
        coordinates = [self._coordinate_of(peer) for peer in self.engine.world.peers(self.axis)]
        after, before = (self.coordinate + 1) % self.count, (self.coordinate - 1) % self.count
        size = prod(self._shape_of_next(part, hop))
        move = Move(part, self.form.shape, self.layout, self.layout, to_next=True)
        with redistribution_scope(move):
            return collectives.all_to_all(
                part.reshape(-1),
                [size if peer == before else 0 for peer in coordinates],
                [part.numel() if peer == after else 0 for peer in coordinates],
                self.engine.groups[self.axis],
            )

    def receive(self, incoming: torch.Tensor, part: torch.Tensor, hop: int) -> torch.Tensor:
        """Waits for the part that comes in hop number `hop`, and returns it.

        `part` is any part: the sizes of its other dims are those of the result.
        """
        return wait(incoming, "all_to_all").reshape(self._shape_of_next(part, hop))

    def _shape_of_next(self, part: torch.Tensor, hop: int) -> list[int]:
        shape = list(part.shape)
        shape[self.dim] = self.sizes[self.owner(hop + 1)]
        return shape

    def _coordinate_of(self, rank: int) -> int:
        return self.engine.world.mesh.position_along([self.axis], rank)
