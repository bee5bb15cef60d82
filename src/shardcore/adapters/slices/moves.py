"""The steps of a redistribution, on plain tensors: slices and collectives along one mesh axis."""

import math
from datetime import timedelta
from functools import lru_cache

import attrs
import torch
import torch.distributed as dist

from shardcore.adapters import process_group
from shardcore.adapters.threads import check_thread
from shardcore.adapters.torch_compat import collectives
from shardcore.domain.layout import Layout, PartialAxes
from shardcore.domain.redistribution import Step, plan
from shardcore.ports.whereabouts import Move, moving
from shardcore.ports.world import World

_SUM = "sum"


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
    steps = plan(source, target, shape, part.element_size())
    if any(step.kind != "slice" for step in steps):
        check_thread()
    with moving(Move(part, shape, source, target)):
        for step in steps:
            part = _MOVES[step.kind](part, step, world)
    return part


@attrs.frozen
class AllReduce:
    """A sum over some mesh axes that is on its way.

    Args:
        started: What becomes the sum over the first axis.
        rest: The other axes.
        world: The mesh over the processes.
    """

    started: torch.Tensor
    rest: tuple[str, ...]
    world: World

    @classmethod
    def start(cls, value: torch.Tensor, partial: PartialAxes, world: World) -> "AllReduce":
        """Start to sum `value` over the axes that are `partial`."""
        axes = [axis for axis, _ in partial if world.mesh.axis_size(axis) > 1]
        started = collectives.all_reduce(value, _SUM, process_groups(world)[axes[0]])
        return cls(started, tuple(axes[1:]), world)

    def wait(self) -> torch.Tensor:
        """The sum."""
        value = collectives.wait(self.started)
        for axis in self.rest:
            group = process_groups(self.world)[axis]
            value = collectives.wait(collectives.all_reduce(value, _SUM, group))
        return value


def _slice(part: torch.Tensor, step: Step, world: World) -> torch.Tensor:
    if step.source_dim is not None or step.op is not None:  # an axis of one rank: it has all
        return part
    return part[step.part(world.position, world.position)].clone()


def _all_gather(part: torch.Tensor, step: Step, world: World) -> torch.Tensor:
    """Chunks may be uneven: each is sent in a buffer of the size of the largest."""
    shapes = [step.source.local_shape(step.shape, peer) for peer in _peers(step, world)]
    buffer = part.new_zeros(max(map(math.prod, shapes)))
    buffer[: part.numel()] = part.reshape(-1)
    buffers = collectives.wait(collectives.all_gather(buffer, _group(step, world)))
    assert step.source_dim is not None
    chunks = [
        each[: math.prod(size)].reshape(size)
        for each, size in zip(buffers.chunk(len(shapes)), shapes, strict=True)
    ]
    return torch.cat(chunks, dim=step.source_dim)


def _all_reduce(part: torch.Tensor, step: Step, world: World) -> torch.Tensor:
    assert step.op is not None
    reduced = collectives.wait(collectives.all_reduce(part, _sent(step), _group(step, world)))
    return reduced / step.source.mesh.axis_size(step.axis) if step.op == "avg" else reduced


def _all_to_all(part: torch.Tensor, step: Step, world: World) -> torch.Tensor:
    peers, rank = _peers(step, world), world.position
    sent = [part[step.part(rank, peer)] for peer in peers]
    shapes = [_shape(step.part(peer, rank)) for peer in peers]
    sizes = [math.prod(shape) for shape in shapes]
    received = collectives.all_to_all(
        torch.cat([each.reshape(-1) for each in sent]),
        sizes,
        [each.numel() for each in sent],
        _group(step, world),
    )
    pieces = torch.split(collectives.wait(received), sizes)
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
    started = collectives.reduce_scatter(buffer.reshape(-1), _sent(step), _group(step, world))
    own = collectives.wait(started)
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


def _sent(step: Step) -> str:
    """What the collective does: gloo has no average."""
    assert step.op is not None
    return _SUM if step.op == "avg" else step.op


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
