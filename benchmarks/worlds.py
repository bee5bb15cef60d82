"""Worlds that are not there: one process that takes itself for rank 0 of many.

torch's "fake" process group answers every collective at once. The values are wrong, and are not
looked at: what a rank hands to collectives is the same as in a real world.
"""

import math
import os
from typing import Any

import attrs

from benchmarks import cases
from benchmarks.cases import Case
from benchmarks.rows import RAN_IN_PYTHON, Row
from shardcore.domain.errors import RankFailed
from shardcore.testing import count_collectives, run_ranks

BLOCKS = 2
WARM_UP = 3
LOSS = 4
MIB = 2**20
BUCKET = 25 * 2**20
SMALL = 64 * 1024  # what the policy "fully_sharded" replicates
TIMEOUT = 200.0


@attrs.frozen
class Moved:
    """The collectives of one step, and the bytes that this rank hands to them."""

    calls: int
    operand_bytes: int


def row(layout: str, ranks: int, strategy: str) -> Row:
    """The bytes that rank 0 moves, against the formula."""
    section = f"{layout}, {ranks} simulated ranks"
    case = _case(layout, ranks)
    try:
        (found,) = run_ranks(
            _measure, 1, case, layout, ranks, strategy, init=False, timeout=TIMEOUT
        )
    except RankFailed as failed:
        return Row(section, "bytes per rank", note=str(failed).strip().splitlines()[-1])
    moved, shapes, layer_calls = found
    theory = formula(case, layout, ranks, shapes)
    note = f"{moved.calls} collectives, in theory {theory.calls}"
    if layer_calls:
        note = f"{RAN_IN_PYTHON}: {note}"
    ratio = moved.operand_bytes / theory.operand_bytes
    return Row(section, "bytes per rank", moved.operand_bytes, "B", "formula", ratio, 1.001, note)


def formula(case: Case, layout: str, ranks: int, shapes: dict[str, tuple[int, ...]]) -> Moved:
    """The bytes of a step by theory.

    Args:
        case: A decoder.
        layout: How it is laid out.
        ranks: Over how many.
        shapes: Of the trainable variables, float32.

    Example:
        >>> case = cases.tiny_decoder(2)
        >>> formula(case, "data parallel", 8, {"kernel": (100, 10)})
        Moved(calls=2, operand_bytes=4004)
        >>> formula(case, "megatron", 8, {})
        Moved(calls=8, operand_bytes=8192)
    """
    if layout == "megatron":
        activation = 4 * case.batch * case.sizes["length"] * case.sizes["width"]
        calls = 4 * case.sizes["blocks"]
        return Moved(calls, calls * activation)
    sizes = [4 * math.prod(shape) for shape in shapes.values()]
    sharded = [size for size in sizes if layout == "fully sharded" and _pays(size, ranks)]
    replicated = sum(sizes) - sum(sharded)
    # A gather forward, another backward, and the gradient reduce-scattered.
    gathered = sum(2 * size // ranks + size for size in sharded)
    return Moved(3 * len(sharded) + _buckets(replicated), gathered + replicated + LOSS)


def _pays(size: int, ranks: int) -> bool:
    return size - size // ranks >= SMALL


def _buckets(size: int) -> int:
    """Gradients in buckets, a second one of more than 1 MiB; and one for loss and metrics."""
    return math.ceil(size / BUCKET) + (size > MIB) + 1


def _case(layout: str, ranks: int) -> Case:
    """A decoder that so many ranks can shard, and that moves far more bytes than the loss."""
    case = cases.tiny_decoder(BLOCKS)
    if layout == "megatron":
        sizes = {"heads": ranks, "width": max(64, ranks), "length": 64}
        return attrs.evolve(case, sizes={**case.sizes, **sizes})
    width = 1024 if layout == "fully sharded" else 128
    return attrs.evolve(case, batch=ranks, sizes={**case.sizes, "width": width})


def _measure(_rank: int, case: Case, layout: str, ranks: int, strategy: str) -> Any:
    import torch.distributed as dist

    from benchmarks import keras_training

    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())
    training = keras_training.train(case, layout, "cpu", strategy=strategy)
    training.losses(WARM_UP)
    batch = case.data(1)
    for _ in range(WARM_UP):  # their batches are not those of `fit`: they are recorded apart
        training.model.train_on_batch(*batch)
    with count_collectives() as traffic:
        training.model.train_on_batch(*batch)
    calls, operand_bytes = traffic.calls.total(), traffic.operand_bytes.total()
    return Moved(calls, operand_bytes), training.trainable(), training.layer_calls()
