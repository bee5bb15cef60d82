"""The steps of a redistribution, on plain tensors: slices and collectives along one mesh axis."""

import math
from datetime import timedelta
from functools import lru_cache
from typing import Any

import attrs
import torch
import torch.distributed as dist

from shardcore.adapters import process_group
from shardcore.adapters.threads import check_thread
from shardcore.domain.layout import Layout, PartialAxes
from shardcore.domain.redistribution import Step, plan
from shardcore.ports.world import World

_OPERATORS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # gloo has no average
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def moved(
    part: torch.Tensor, source: Layout, target: Layout, shape: tuple[int, ...], world: World
) -> torch.Tensor:
    """This rank's part in layout `target`, of a tensor of which it has `part` in `source`.

    Args:
        part: What this rank has; it is kept as it is.
        source: The layout that the tensor has.
        target: The layout that it shall have.
        shape: The global shape of the tensor.
        world: The mesh over the processes. All ranks call it together.
    """
    for step in plan(source, target, shape, part.element_size()):
        if step.kind != "slice":
            check_thread()
        part = _MOVES[step.kind](part, step, world)
    return part


@attrs.frozen
class AllReduce:
    """A sum over some mesh axes that is on its way.

    Args:
        value: What becomes the sum.
        work: The collective over the first axis.
        rest: The other axes.
        world: The mesh over the processes.
    """

    value: torch.Tensor
    work: Any
    rest: tuple[str, ...]
    world: World

    @classmethod
    def start(cls, value: torch.Tensor, partial: PartialAxes, world: World) -> "AllReduce":
        """Start to sum `value`, which is overwritten, over the axes that are `partial`."""
        axes = [axis for axis, _ in partial if world.mesh.axis_size(axis) > 1]
        work = dist.all_reduce(value, group=process_groups(world)[axes[0]], async_op=True)
        return cls(value, work, tuple(axes[1:]), world)

    def wait(self) -> torch.Tensor:
        """The sum."""
        self.work.wait()
        for axis in self.rest:
            dist.all_reduce(self.value, group=process_groups(self.world)[axis])
        return self.value


def _slice(part: torch.Tensor, step: Step, world: World) -> torch.Tensor:
    if step.source_dim is not None or step.op is not None:  # an axis of one rank: it has all
        return part
    return part[step.part(world.position, world.position)].clone()


def _all_gather(part: torch.Tensor, step: Step, world: World) -> torch.Tensor:
    """Chunks may be uneven: each is sent in a buffer of the size of the largest."""
    shapes = [step.source.local_shape(step.shape, peer) for peer in _peers(step, world)]
    buffer = part.new_zeros(max(map(math.prod, shapes)))
    buffer[: part.numel()] = part.reshape(-1)
    buffers = [torch.empty_like(buffer) for _ in shapes]
    dist.all_gather(buffers, buffer, group=_group(step, world))
    assert step.source_dim is not None
    chunks = [
        each[: math.prod(size)].reshape(size) for each, size in zip(buffers, shapes, strict=True)
    ]
    return torch.cat(chunks, dim=step.source_dim)


def _all_reduce(part: torch.Tensor, step: Step, world: World) -> torch.Tensor:
    assert step.op is not None
    reduced = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(reduced, _OPERATORS[step.op], group=_group(step, world))
    return reduced / step.source.mesh.axis_size(step.axis) if step.op == "avg" else reduced


def _all_to_all(part: torch.Tensor, step: Step, world: World) -> torch.Tensor:
    peers, rank = _peers(step, world), world.position
    sent = [part[step.part(rank, peer)] for peer in peers]
    shapes = [_shape(step.part(peer, rank)) for peer in peers]
    received = part.new_empty(sum(map(math.prod, shapes)))
    dist.all_to_all_single(
        received,
        torch.cat([each.reshape(-1) for each in sent]),
        [math.prod(shape) for shape in shapes],
        [each.numel() for each in sent],
        group=_group(step, world),
    )
    sizes = [math.prod(shape) for shape in shapes]
    pieces = torch.split(received, sizes)
    assert step.source_dim is not None
    return torch.cat(
        [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)],
        dim=step.source_dim,
    )


def _reduce_scatter(part: torch.Tensor, step: Step, world: World) -> torch.Tensor:
    """Parts may be uneven: each is sent in a buffer of the size of the largest."""
    assert step.op is not None
    peers, rank = _peers(step, world), world.position
    wanted = [part[step.part(rank, peer)] for peer in peers]
    size = max(each.numel() for each in wanted)
    buffer = part.new_zeros((len(peers), size))
    for row, each in zip(buffer, wanted, strict=True):
        row[: each.numel()] = each.reshape(-1)
    own = part.new_empty(size)
    dist.reduce_scatter_single(
        own, buffer.reshape(-1), _OPERATORS[step.op], group=_group(step, world)
    )
    shape = _shape(step.part(rank, rank))
    reduced = own[: math.prod(shape)].reshape(shape)
    return reduced / len(peers) if step.op == "avg" else reduced


_MOVES = {
    "slice": _slice,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
}


def _shape(part: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(each.stop - each.start for each in part)


def _peers(step: Step, world: World) -> tuple[int, ...]:
    """The mesh ranks along the axis, in its order."""
    return world.mesh.axis_group(step.axis, world.position)


def _group(step: Step, world: World) -> dist.ProcessGroup:
    return process_groups(world)[step.axis]


def process_groups(world: World) -> dict[str, dist.ProcessGroup]:
    """By mesh axis, the group of this process. Made once; all processes call it together."""
    return _made(world, dist.group.WORLD)


@lru_cache(maxsize=64)
def _made(world: World, _job: dist.ProcessGroup) -> dict[str, dist.ProcessGroup]:
    timeout = timedelta(seconds=process_group.seconds(None))
    mine: dict[str, dist.ProcessGroup] = {}
    for axis in world.mesh.axis_names:
        for ranks in world.mesh.axis_groups(axis):
            group = dist.new_group([world.processes[rank] for rank in ranks], timeout=timeout)
            if world.position in ranks:
                mine[axis] = group
    return mine
