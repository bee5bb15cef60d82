"""Reads weights into shards: of the ranks of a host one reads a part, and sends it to the others.

So a host reads each byte of a file once, whatever is replicated.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import TypeVar

import attrs
import torch

from shardcore.binding.checkpoints.state import StateTensor
from shardcore.binding.ranks.session import Session
from shardcore.domain.checkpoints.file_format import nbytes_of
from shardcore.domain.checkpoints.grid import Box, HeldPart, held_parts, intersection
from shardcore.domain.checkpoints.host_reads import HostRead, HostReads
from shardcore.domain.checkpoints.rearrangement import BoxPair, Rearrangement
from shardcore.domain.checkpoints.weight_keys import FileTensor, TensorFunction
from shardcore.domain.errors import CheckpointError, OtherRankFailed
from shardcore.ports.checkpoints import WeightReader

Result = TypeVar("Result")
Rule = Rearrangement | TensorFunction
Parts = dict[Box, torch.Tensor]  # parts of a tensor, by their box in the file


@attrs.define(eq=False, slots=False)
class WeightReading:
    """Tensors of files that all ranks read into weights, in the same order.

    After an error a rank reads no more, but sends what the others wait for; `finish` raises it.

    Args:
        reader: The open files.
        session: The session of the model; None without a distribution.

    Attributes:
        bytes_read: The bytes that this rank has read from files.
    """

    reader: WeightReader
    session: Session | None
    bytes_read: int = attrs.field(default=0, init=False)
    _reads: HostReads = attrs.field(factory=HostReads, init=False)
    _failure: Exception | None = attrs.field(default=None, init=False)

    def read(self, weight: StateTensor, tensor: FileTensor, rule: Rule) -> None:
        """Reads what this rank holds of a weight, and sends what it reads for others."""
        wanted = _wanted(weight, tensor, rule, self._position)
        parts: Parts = {}
        for read in self._reads.plan(
            {rank: self._units(weight, tensor, rule, rank) for rank in self._host}
        ):
            if self._position in read.ranks:
                data = self._fetch(tensor, read)
                self._attempt(
                    partial(_collect, parts, wanted, _values(data, tensor, read.box), read.box)
                )
        held = held_parts(weight.layout, weight.shape, self._position)
        if held:
            self._attempt(partial(_assign, weight, tensor, rule, held, parts))

    def finish(self) -> int:
        """Raises the first error of this rank, or returns the bytes that it has read."""
        if self._failure is not None:
            raise self._failure
        return self.bytes_read

    @property
    def _position(self) -> int:
        return 0 if self.session is None else self.session.world.position

    @cached_property
    def _host(self) -> tuple[int, ...]:
        """The ranks of this host."""
        if self.session is None:
            return (0,)
        world, hosts = self.session.world, self.session.processes.hosts
        own = hosts[world.process]
        return tuple(n for n, process in enumerate(world.processes) if hosts[process] == own)

    def _units(
        self, weight: StateTensor, tensor: FileTensor, rule: Rule, rank: int
    ) -> dict[Box, None]:
        """Lists, once each, the parts that are read to get what a rank holds of a weight."""
        wanted = _wanted(weight, tensor, rule, rank)
        return dict.fromkeys(unit for box in wanted for unit in self.reader.units(tensor, box))

    def _fetch(self, tensor: FileTensor, read: HostRead) -> memoryview:
        """Reads a part, or receives it. Its ranks call it together."""
        own = None
        if read.reader == self._position:
            own = self._attempt(partial(self.reader.read, tensor, read.box))
        data, count = own or (memoryview(bytearray(nbytes_of(tensor.dtype, read.box.shape))), 0)
        self.bytes_read += count
        if self.session is not None and len(read.ranks) > 1:
            process_of = self.session.world.processes
            others = [process_of[rank] for rank in read.ranks if rank != read.reader]
            self.session.processes.send_bytes(data, process_of[read.reader], others)
        return data

    def _attempt(self, work: Callable[[], Result]) -> Result | None:
        """Does `work` unless an error came before, and keeps its error."""
        if self._failure is None:
            try:
                return work()
            except OtherRankFailed:
                raise
            except Exception as error:  # noqa: BLE001 - `finish` raises it
                self._failure = error
        return None


def _wanted(weight: StateTensor, tensor: FileTensor, rule: Rule, rank: int) -> list[Box]:
    """Lists the parts of a tensor from which a rank gets what it holds of a weight."""
    held = held_parts(weight.layout, weight.shape, rank)
    if not isinstance(rule, Rearrangement):
        return [_whole(tensor)] if held else []
    return [pair.file for part in held for pair in rule.box_pairs(part.full)]


def _whole(tensor: FileTensor) -> Box:
    return Box((0,) * len(tensor.shape), tensor.shape)


def _values(data: memoryview, tensor: FileTensor, box: Box) -> torch.Tensor:
    """Views bytes that were read as a tensor."""
    return torch.frombuffer(data, dtype=getattr(torch, tensor.dtype)).view(box.shape)


def _collect(parts: Parts, wanted: list[Box], values: torch.Tensor, box: Box) -> None:
    """Adds the values of `box` to those of the wanted parts, without a copy if it has all."""
    for part in wanted:
        common = intersection(part, box)
        if common == part:
            parts[part] = values[part.within(box).slices]
        elif min(common.shape) > 0:
            if part not in parts:
                parts[part] = values.new_empty(part.shape)
            parts[part][common.within(part).slices] = values[common.within(box).slices]


def _assign(
    weight: StateTensor, tensor: FileTensor, rule: Rule, held: list[HeldPart], parts: Parts
) -> None:
    """Copies the parts into the local shard, rearranged or through a function."""
    if isinstance(rule, Rearrangement):
        for part in held:
            for pair in rule.box_pairs(part.full):
                target = in_order_of_file(weight.local, pair, part.local_box(pair.variable))
                target.copy_(_cast(parts[pair.file], weight.local.dtype, tensor).view(pair.factors))
        return
    full = rule(parts[_whole(tensor)])
    if not isinstance(full, torch.Tensor) or tuple(full.shape) != weight.shape:
        raise CheckpointError(
            f"The function for {tensor.key!r} gave another shape than without values, expected "
            f"{weight.shape}: the model may have changed.",
            name=tensor.key,
        )
    for part in held:
        weight.local[part.local.slices].copy_(full[part.full.slices])


def _cast(values: torch.Tensor, dtype: torch.dtype, tensor: FileTensor) -> torch.Tensor:
    """Casts integers, whose values stay; `copy_` casts floats."""
    if values.dtype == dtype or dtype.is_floating_point:
        return values
    cast = values.to(dtype)
    if not torch.equal(cast.to(torch.int64), values.to(torch.int64)):
        raise CheckpointError(
            f"{tensor.key!r} has values of {tensor.dtype} in the file that {dtype} does not have.",
            name=tensor.key,
        )
    return cast


def in_order_of_file(local: torch.Tensor, pair: BoxPair, box: Box) -> torch.Tensor:
    """Views a box of a local shard by the factors of a pair, permuted as in the file."""
    factors = [pair.factors[number] for number in pair.order]
    inverse = sorted(range(len(factors)), key=pair.order.__getitem__)
    return local[box.slices].view(factors).permute(inverse)
