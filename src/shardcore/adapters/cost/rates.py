"""The rates of this machine, as its ranks reach them at the same time, for costs (ADR 26)."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import attrs
import torch
import torch.distributed as dist

from shardcore.adapters.ranks.job import devices, process_group
from shardcore.adapters.torch_private import collectives
from shardcore.domain.cost.collective_cost import Link, bytes_sent
from shardcore.domain.cost.machine import Speed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SECONDS = 1.0  # of one measurement
_RUNS = 50  # at most
_COPIED = 64 * 2**20  # larger than caches: bytes that are copied
_SENT = 16 * 2**20  # bytes of the tensor whose collectives show the bandwidth
_ONE_MATRIX = 256  # the size of the first matrix, from which that of the measured one follows
_LARGEST = 8192


@attrs.frozen
class _Collective:
    kind: str
    sent: float  # the bytes that a rank sends
    start: Callable[[], torch.Tensor]

    def run(self) -> None:
        collectives.wait(self.start())


def speeds() -> dict[str, Speed]:
    """Measures matrix products and copies on this device, by dtype: `float32`, for instance."""
    device = devices.device_type()
    return {str(dtype).removeprefix("torch."): _speed(dtype, device) for dtype in _DTYPES}


def memory(ranks_here: int) -> int:
    """Reads the bytes of memory of this device; on CPUs the share of one rank of this host."""
    if devices.device_type() == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_here


def link(groups: Sequence[Sequence[int]]) -> Link:
    """Measures the link between the ranks of a group, while all groups are at work.

    The latency is the time that an all-reduce of one number adds to a product of matrices: ranks
    wait for the last one, and longer where they share cores. The bandwidth of each kind follows
    from a collective in which the largest tensor of a rank has 16 MiB, and the bytes of a ring. A
    collective: all ranks call it.

    Args:
        groups: The processes of each group; each process is in one, and all have the same size.
    """
    device = devices.device_type()
    limit = timedelta(seconds=process_group.seconds(None))
    made = [(ranks, dist.new_group(list(ranks), timeout=limit)) for ranks in groups]
    group = next(candidate for ranks, candidate in made if process_group.rank() in ranks)
    latency = _latency(group, device)
    bandwidths: dict[str, float] = {}
    for collective in _collectives(group, device):
        seconds = min(_times(collective.run, _RUNS // 5))
        bandwidths[collective.kind] = collective.sent / max(seconds - latency, 1e-9)
    return Link(latency, bandwidths.pop("all_reduce"), bandwidths)


def _latency(group: dist.ProcessGroup, device: str) -> float:
    """Measures the seconds that an all-reduce of one number takes between two operators."""
    one = torch.zeros(1, device=device)
    matrix = torch.ones(_ONE_MATRIX, _ONE_MATRIX, device=device)

    def both() -> None:
        torch.mm(matrix, matrix)
        dist.all_reduce(one, group=group)

    # All ranks run equally often: the time is that of a fixed number of collectives.
    alone = statistics.mean(_times(lambda: torch.mm(matrix, matrix), _RUNS))
    shortest = min(_times(lambda: dist.all_reduce(one, group=group), _RUNS))
    return max(shortest, statistics.mean(_times(both, _RUNS)) - alone)


def _collectives(group: dist.ProcessGroup, device: str) -> list[_Collective]:
    ranks, part = group.size(), _SENT // 4 // group.size()
    shard, full = torch.zeros(part, device=device), torch.zeros(ranks * part, device=device)
    equal = [part] * ranks
    to_next, from_last = ([0] * ranks for _ in range(2))
    to_next[(group.rank() + 1) % ranks] = from_last[group.rank() - 1] = full.numel()
    return [
        _Collective(kind, bytes_sent(kind, ranks, held * full.nbytes), start)
        for kind, held, start in (
            ("all_reduce", 1, partial(collectives.all_reduce, full, "sum", group)),
            ("all_gather", 1, partial(collectives.all_gather, shard, group)),
            ("reduce_scatter", 1, partial(collectives.reduce_scatter, full, "sum", group)),
            ("all_to_all", ranks, partial(collectives.all_to_all, full, equal, equal, group)),
            ("send", ranks, partial(collectives.all_to_all, full, from_last, to_next, group)),
        )
    ]


def hidden() -> float:
    """Measures the share of an all-reduce, 0 to 1, that is hidden behind products of matrices.

    If one after the other takes `a + b`, and both together take `c`, that is `a + b - c` of the
    shorter one. A collective: all ranks call it.
    """
    device = devices.device_type()
    many = torch.zeros(_SENT // 4, device=device)
    matrix = torch.ones(_ONE_MATRIX, _ONE_MATRIX, device=device)
    sends = min(_times(lambda: dist.all_reduce(many), _RUNS // 5))
    products = max(1, round(sends / min(_times(lambda: matrix @ matrix))))

    def compute() -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def both() -> None:
        started = dist.all_reduce(many, async_op=True)
        compute()
        started.wait()

    computes = min(_times(compute, _RUNS // 5))
    saved = sends + computes - min(_times(both, _RUNS // 5))
    return min(1.0, max(0.0, saved / min(sends, computes)))


def _speed(dtype: torch.dtype, device: str) -> Speed:
    first = _seconds_of_product(_ONE_MATRIX, dtype, device)
    # A product of so many rows takes about a tenth of a measurement, if it is as fast.
    size = int(_ONE_MATRIX * (_SECONDS / 10 / first) ** (1 / 3)) // 64 * 64
    size = max(_ONE_MATRIX, min(size, _LARGEST))
    flops = 2 * size**3 / _seconds_of_product(size, dtype, device)
    source = torch.zeros(_COPIED // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    seconds = min(_times(lambda: target.copy_(source)))
    return Speed(flops, 2 * _COPIED / seconds)


def _seconds_of_product(size: int, dtype: torch.dtype, device: str) -> float:
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return min(_times(lambda: left @ right))


def _times(run: Callable[[], object], runs: int | None = None) -> list[float]:
    """Measures the seconds of `runs` runs after a first one; by default, of as many as fit."""
    run()
    seconds: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(seconds) < (runs or _RUNS) and (runs or not seconds or time.perf_counter() < end):
        _synchronize()
        start = time.perf_counter()
        run()
        _synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def _synchronize() -> None:
    if devices.device_type() == "cuda":
        torch.cuda.synchronize()
