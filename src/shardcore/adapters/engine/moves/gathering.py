"""Gathers a large tensor in pieces."""

import math
from collections.abc import Sequence

import torch

from shardcore.adapters.engine.moves.steps import pad_to_size, wait
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.job.threads import check_thread
from shardcore.adapters.torch_private import collectives
from shardcore.domain.layout import Layout
from shardcore.domain.pieces import pieces
from shardcore.domain.redistribution.segments import without_segments
from shardcore.ports.measurement.trace_context import Move, redistribution_scope
from shardcore.ports.world import World

# The bytes that all ranks together send at once. Smaller tensors are all-gathered at once.
GATHERED_BYTES = 1 * 1024 * 1024


def gather_in_pieces(tensor: ShardedTensor, at_once: int = GATHERED_BYTES) -> torch.Tensor:
    """Returns the full tensor of `tensor`, which is not partial, as a plain one.

    A collective on whole shards would hold a second full tensor: its result has the shards one
    after another, and gloo copies them. Here little is held beside the full tensor.
    """
    check_thread()
    engine, form, world = tensor.engine, tensor.form, tensor.engine.world
    sizes, layout = without_segments(form.layout, form.shape)
    axes = [axis for dim in range(layout.ndim) for axis in layout.dim_axes(dim)]
    ranks = _in_gathered_order(axes, world, world.position)
    part = tensor.part.reshape(layout.local_shape(sizes, world.position))
    held = [layout.slices(sizes, rank) for rank in ranks]
    full = part.new_empty(sizes)
    largest = layout.local_shape(sizes, rank=0)
    most = at_once // form.dtype.itemsize // len(ranks)
    target = Layout.replicated(world.mesh, form.ndim)
    with redistribution_scope(Move(tensor.part, form.shape, form.layout, target)):
        for piece in pieces(largest, most):
            sent = pad_to_size(
                part[piece], math.prod(bounds.stop - bounds.start for bounds in piece)
            )
            for axis in axes:
                sent = wait(collectives.all_gather(sent, engine.groups[axis]), "all_gather")
            for slices, values in zip(held, sent.chunk(len(ranks)), strict=True):
                view = full[slices][piece]
                view.copy_(values[: view.numel()].reshape(view.shape))
    return full.reshape(form.shape)


def _in_gathered_order(axes: Sequence[str], world: World, rank: int) -> list[int]:
    """Returns the ranks whose pieces `rank` has after all-gathers along `axes`, in their order."""
    if not axes:
        return [rank]
    peers = world.peers(axes[-1], rank)
    return [source for peer in peers for source in _in_gathered_order(axes[:-1], world, peer)]
