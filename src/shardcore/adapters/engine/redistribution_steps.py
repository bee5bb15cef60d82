"""The steps of a redistribution on local shards: slices, and collectives along a mesh axis."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.ranks.waiting import wait
from shardcore.adapters.torch_private import collectives
from shardcore.domain.engine.exchange import Exchange, Strided
from shardcore.domain.engine.redistribution import Step


def _slice(part: torch.Tensor, step: Step, engine: Engine) -> torch.Tensor:
    if step.source_dim is not None or step.op is not None:  # an axis of one rank has it all
        return part
    return part[step.part(engine.world.position, engine.world.position)].clone()


def _all_gather(part: torch.Tensor, step: Step, engine: Engine) -> torch.Tensor:
    """Sends each uneven shard in a buffer of the size of the largest one."""
    assert step.source_dim is not None
    peers = engine.world.peers(step.axis)
    shapes = [step.source.local_shape(step.shape, peer) for peer in peers]
    sizes = [math.prod(shape) for shape in shapes]
    buffer = pad_to_size(part, max(sizes))
    buffers = wait(collectives.all_gather(buffer, engine.groups[step.axis]), "all_gather")
    even = len(set(shapes)) == 1 and math.prod(shapes[0][: step.source_dim]) == 1
    if even and _is_sorted(peers):
        dims = list(shapes[0])
        dims[step.source_dim] *= len(shapes)
        return buffers.reshape(dims)
    chunks = [
        chunk[:size].reshape(shape)
        for chunk, size, shape in zip(buffers.chunk(len(shapes)), sizes, shapes, strict=True)
    ]
    return torch.cat(_in_axis_order(chunks, peers), dim=step.source_dim)


def _is_sorted(peers: Sequence[int]) -> bool:
    return list(peers) == sorted(peers)


def _in_axis_order(chunks: Sequence[torch.Tensor], peers: Sequence[int]) -> list[torch.Tensor]:
    """Sorts `chunks`, one of each of `peers`, by the positions of the peers along the axis."""
    return [chunk for _, chunk in sorted(zip(peers, chunks, strict=True), key=lambda pair: pair[0])]


def pad_to_size(part: torch.Tensor, size: int) -> torch.Tensor:
    """Flattens `part`, and pads it with zeros to `size` elements."""
    flat = part.reshape(-1)
    if flat.numel() == size:
        return flat
    return torch.nn.functional.pad(flat, (0, size - flat.numel()))


def _all_reduce(part: torch.Tensor, step: Step, engine: Engine) -> torch.Tensor:
    assert step.op is not None
    started = collectives.all_reduce(part, _collective_op(step), engine.groups[step.axis])
    reduced = wait(started, "all_reduce")
    return reduced / step.source.mesh.axis_size(step.axis) if step.op == "avg" else reduced


def _all_to_all(part: torch.Tensor, step: Step, engine: Engine) -> torch.Tensor:
    peers, rank = engine.world.peers(step.axis), engine.world.position
    sent = [part[step.part(rank, peer)] for peer in peers]
    shapes = [_shape(step.part(peer, rank)) for peer in peers]
    assert step.source_dim is not None
    chunks = _send_and_receive(sent, shapes, step, engine)
    return torch.cat(_in_axis_order(chunks, peers), dim=step.source_dim)


def _send_and_receive(
    sent: Sequence[torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    step: Step | Exchange,
    engine: Engine,
) -> list[torch.Tensor]:
    """Sends one tensor to each rank of the group; returns the received ones, in these shapes."""
    sizes = [math.prod(shape) for shape in shapes]
    received = collectives.all_to_all(
        torch.cat([tensor.reshape(-1) for tensor in sent]),
        sizes,
        [tensor.numel() for tensor in sent],
        engine.groups[step.axis],
    )
    pieces = torch.split(wait(received, "all_to_all"), sizes)
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def run_exchange(part: torch.Tensor, exchange: Exchange, engine: Engine) -> torch.Tensor:
    """Collects the elements that this rank wants, from all ranks along the axis."""
    mesh, dim = engine.world.mesh, exchange.dim
    own = mesh.position_along([exchange.axis], engine.world.position)

    def part_for(coordinate: int) -> torch.Tensor:
        even = exchange.strided(own, coordinate)
        if even is not None:
            return _take_strided(part, dim, even)
        slices = [
            part.narrow(dim, e.start, e.stop - e.start)
            for e in exchange.slices_for(own, coordinate)
        ]
        return torch.cat(slices or [part.narrow(dim, 0, 0)], dim)

    if exchange.is_local:
        return part_for(own)
    peers = engine.world.peers(exchange.axis)
    coordinates = [mesh.position_along([exchange.axis], peer) for peer in peers]
    turn, count = exchange.turns(own)
    totals = [count * sum(size for owner, size in turn if owner == peer) for peer in coordinates]
    shapes = [(*part.shape[:dim], total, *part.shape[dim + 1 :]) for total in totals]
    chunks = _send_and_receive([part_for(peer) for peer in coordinates], shapes, exchange, engine)
    if not turn:
        return chunks[0]
    return _interleave(dict(zip(coordinates, chunks, strict=True)), turn, count, dim)


def _take_strided(part: torch.Tensor, dim: int, slices: Strided) -> torch.Tensor:
    """Takes slices of one dim as one tensor, by a view and at most one copy."""
    span = part.narrow(dim, slices.start, (slices.count - 1) * slices.step + slices.size)
    windows = span.unfold(dim, slices.size, slices.step)  # the elements of each are the last dim
    return windows.movedim(-1, dim + 1).flatten(dim, dim + 1)


def _interleave(
    chunks: Mapping[int, torch.Tensor], turn: Sequence[tuple[int, int]], count: int, dim: int
) -> torch.Tensor:
    """Sorts the parts of chunks into the order of `count` turns.

    A turn has the chunk and the size of each part. All turns are joined at once, along a dim for
    them.
    """
    parts: dict[int, Iterator[torch.Tensor]] = {}
    for at, chunk in chunks.items():
        if sizes := [size for owner, size in turn if owner == at]:
            shape = (*chunk.shape[:dim], count, sum(sizes), *chunk.shape[dim + 1 :])
            parts[at] = iter(torch.split(chunk.view(shape), sizes, dim + 1))
    return torch.cat([next(parts[owner]) for owner, _ in turn], dim + 1).flatten(dim, dim + 1)


def _reduce_scatter(part: torch.Tensor, step: Step, engine: Engine) -> torch.Tensor:
    """Sends each uneven shard in a buffer of the size of the largest one."""
    assert step.op is not None
    assert step.target_dim is not None
    peers, rank = engine.world.peers(step.axis), engine.world.position
    targets = [step.part(rank, peer) for peer in peers]
    shapes = [_shape(target) for target in targets]
    sizes = [math.prod(shape) for shape in shapes]
    even = len(set(shapes)) == 1 and math.prod(part.shape[: step.target_dim]) == 1
    if even and _is_sorted(peers):
        buffer = part.reshape(-1)
    else:
        size = max(sizes)
        buffer = torch.cat([pad_to_size(part[target], size) for target in targets])
    started = collectives.reduce_scatter(buffer, _collective_op(step), engine.groups[step.axis])
    own = wait(started, "reduce_scatter")
    shape = _shape(step.part(rank, rank))
    reduced = own[: math.prod(shape)].reshape(shape)
    return reduced / len(peers) if step.op == "avg" else reduced


STEPS: dict[str, Callable[[torch.Tensor, Any, Engine], torch.Tensor]] = {
    "slice": _slice,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "exchange": run_exchange,
    "reduce_scatter": _reduce_scatter,
}


def _collective_op(step: Step) -> str:
    """Chooses the reduction: a sum for an average, which gloo lacks."""
    assert step.op is not None
    return "sum" if step.op == "avg" else step.op


def _shape(part: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(bounds.stop - bounds.start for bounds in part)
