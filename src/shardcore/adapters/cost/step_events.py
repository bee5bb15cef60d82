"""The events of a step on tensors without values, each with its block (ADR 46)."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.cost.memory import StepMemory
from shardcore.adapters.flops import count_flops
from shardcore.adapters.torch_private import Operator
from shardcore.domain.cost import events as domain
from shardcore.domain.cost.rank_step import is_sum
from shardcore.domain.cost.reasons import CollectiveFacts
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.variable_size import ShardedVariable

Shares = tuple[tuple[str, int], ...]


@attrs.define(eq=False)
class StepEvents(StepMemory):
    """The port `EventTracer`: it watches all operators, and where in the step they run.

    In the forward pass an event belongs to the block that is called; in the backward pass to that
    of autograd's node; in the update to the block whose variables an operator reads.
    """

    _operators: Counter[tuple[domain.Work, str, Shares]] = attrs.field(factory=Counter, init=False)
    _started: list[domain.TracedCollective] = attrs.field(factory=list, init=False)
    _spans: list[domain.BlockSpan] = attrs.field(factory=lambda: [domain.BlockSpan(0)], init=False)
    # By the number of an allocation: its block, empty if it is known to belong to none.
    _blocks: dict[int, str] = attrs.field(factory=dict, init=False)
    _shares: dict[int, Shares] = attrs.field(factory=dict, init=False)
    _sums: dict[int, str] = attrs.field(factory=dict, init=False)
    # The first node of each call of a block, and the first after it.
    _turns: list[tuple[int, str]] = attrs.field(factory=list, init=False)
    _open: str = attrs.field(default="", init=False)  # the block that is called
    # Of the collective that starts.
    _pending: CollectiveFacts | None = attrs.field(default=None, init=False)
    _in_pass: bool = attrs.field(default=False, init=False)
    _updates: bool = attrs.field(default=False, init=False)
    _end_of_pass: int = attrs.field(default=0, init=False)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Opens the update of the optimizer."""
        self._updates = True
        try:
            yield
        finally:
            self._updates = False
            self._go_to("")

    @contextmanager
    def block(self, path: str) -> Iterator[None]:
        """Opens the call of the block at `path`; again in a backward pass it changes nothing."""
        if torch_private.backward_pass() >= 0:
            yield
            return
        self._open = path
        self._go_to(path)
        self._turns.append((torch_private.count_nodes(), path))
        try:
            yield
        finally:
            # What is freed before the next operator, or block, belongs to this one.
            self._open = ""
            self._turns.append((torch_private.count_nodes(), ""))

    def own(self, tensor: torch.Tensor, block: str) -> None:
        """Notes that a tensor that is held belongs to `block`; empty for none."""
        number = self._held.get(torch_private.memory_of(tensor))
        if number is not None:
            self._blocks[number] = block

    def start(self, facts: CollectiveFacts) -> None:
        """Notes a collective, before it is started."""
        self._time += 1
        self._pending = facts

    def events(self, mesh: Mesh, stored: Mapping[int, ShardedVariable]) -> domain.TracedStep:
        """Converts all times to ticks; `stored` has variables by the numbers of allocations."""
        operators = (
            domain.Operators(attrs.evolve(work, times=times), block, shares)
            for (work, block, shares), times in self._operators.items()
        )
        held = (
            domain.TracedMemory(
                _in_ticks(made),
                self._blocks.get(number, ""),
                stored.get(number),
                self._sums.get(number, ""),
                self._shares.get(number, ()),
            )
            for number, made in enumerate(self._made)
        )
        started = (
            attrs.evolve(collective, time=collective.time * domain.TICK)
            for collective in self._started
        )
        spans = (attrs.evolve(span, begin=span.begin * domain.TICK) for span in self._spans)
        end = self._end_of_pass * domain.TICK
        return domain.TracedStep(
            mesh, tuple(operators), tuple(started), tuple(held), tuple(spans), end
        )

    def _on_operator(self, operator: Operator, operands: object, result: object) -> None:
        owners = self._owners(operands)
        self._locate(operands, owners)
        first = len(self._made)
        super()._on_operator(operator, operands, result)
        current = self._spans[-1].block
        for number in range(first, len(self._made)):
            self._blocks.setdefault(number, current)
        if not current:
            self._own_results(operands, result, first, owners)
        if self._pending is not None and torch_private.is_of_collectives(operator):
            self._note_started(self._pending, operands, owners, first)
        elif _is_work(operator) and _tensors_in((operands, result)):
            touched = _touched_tensors(operator, operands, result)
            dtype, flops = _dtype_of((operands, result)), count_flops(operator, operands, result)
            moved = sum(map(_size_of, touched))
            work = domain.Work(str(operator), dtype, flops, moved, self._updates)
            shares = () if current else self._share(touched)
            if work.bytes:
                self._operators[work, current, shares] += 1

    def _note_started(
        self, facts: CollectiveFacts, operands: object, owners: set[str], first: int
    ) -> None:
        """Notes the collective, whose results are the allocations from the number `first` on."""
        self._pending = None
        tensors = _tensors_in(operands)
        block = self._spans[-1].block or (next(iter(owners)) if len(owners) == 1 else "")
        shares = () if block else self._share(tensors)
        dtype = _dtype_of(tensors) if tensors else ""
        time = self._time - (len(self._made) - first)  # before its results
        self._started.append(domain.TracedCollective(facts, time, block, dtype, shares))
        if is_sum(facts):
            self._sums |= dict.fromkeys(range(first, len(self._made)), facts.reduced[0])

    # Where in the step this thread is.

    def _locate(self, operands: object, owners: set[str]) -> None:
        if torch_private.backward_pass() >= 0:
            if not self._in_pass:
                self._in_pass = True
                torch_private.after_backward(self._end_pass)
            node = torch_private.current_node()
            if node is not None and not self._end_of_pass:
                at = bisect_right(self._turns, node, key=lambda turn: turn[0])
                self._go_to(self._turns[at - 1][1] if at else "")
        elif self._updates:
            if len(owners) == 1:
                self._go_to(next(iter(owners)))
            elif owners or any(map(self._is_common, _tensors_in(operands))):
                self._go_to("")
        elif not self._open:
            self._go_to("")

    def _end_pass(self) -> None:
        self._go_to("")
        self._time += 1
        self._end_of_pass = self._time

    def _go_to(self, block: str) -> None:
        if block != self._spans[-1].block:
            self._time += 1
            self._spans.append(domain.BlockSpan(self._time, block))

    # Which block a tensor belongs to.

    def _owners(self, operands: object) -> set[str]:
        return {block for tensor in _tensors_in(operands) if (block := self._block(tensor))}

    def _block(self, tensor: torch.Tensor) -> str:
        number = self._held.get(torch_private.memory_of(tensor))
        return "" if number is None else self._blocks.get(number, "")

    def _is_common(self, tensor: torch.Tensor) -> bool:
        """Leaves out single numbers, such as a learning rate, which any block may read."""
        number = self._held.get(torch_private.memory_of(tensor))
        return number is not None and self._blocks.get(number) == "" and tensor.numel() > 1

    def _share(self, tensors: Sequence[torch.Tensor]) -> Shares:
        """Sums bytes by block; a tensor may belong to several blocks."""
        shares: Counter[str] = Counter()
        for tensor in tensors:
            if block := self._block(tensor):
                shares[block] += _size_of(tensor)
            number = self._held.get(torch_private.memory_of(tensor))
            if number is not None:
                shares.update(dict(self._shares.get(number, ())))
        return tuple(sorted(shares.items()))

    def _own_results(self, operands: Any, result: Any, first: int, owners: set[str]) -> None:
        """Assigns the results of an operator outside of blocks to the blocks of its operands.

        An operator on lists gives each result to the blocks of the operands at its index. The
        result of one that joins a list belongs to all of them.
        """
        if not (owners and self._end_of_pass):
            return
        args, _ = operands
        lists = [arg for arg in args if isinstance(arg, list | tuple)]
        results = result if isinstance(result, list | tuple) else [result]
        if lists and all(len(tensors) == len(results) for tensors in lists):
            for index, made in enumerate(results):
                self._own_result(made, first, self._owners([one[index] for one in lists]))
        elif len(owners) == 1:
            for made in results:
                self._own_result(made, first, owners)
        elif len(results) == 1 and len(self._made) > first:
            joined = _tensors_in(lists)
            size = _tensors_in(result)[0].nbytes
            if joined and sum(tensor.nbytes for tensor in joined) == size:
                self._shares[first] = self._share(joined)

    def _own_result(self, result: object, first: int, owners: set[str]) -> None:
        if isinstance(result, torch.Tensor) and len(owners) == 1:
            number = self._held.get(torch_private.memory_of(result), -1)
            if number >= first:
                self._blocks[number] = next(iter(owners))


def _in_ticks(one: domain.Allocation) -> domain.Allocation:
    end = None if one.end is None else one.end * domain.TICK
    return attrs.evolve(one, begin=one.begin * domain.TICK, end=end)


_ALLOCATES = ("empty", "new_empty")  # the operators that only allocate
_QUESTIONS = "prim"  # the namespace of questions about a tensor, such as its device


def _is_work(operator: Operator) -> bool:
    """Leaves out views, allocations, collectives and questions such as `prim::device`."""
    name = str(operator)
    return not (
        torch_private.is_of_collectives(operator)
        or torch_private.is_view(operator)
        or name.startswith(_QUESTIONS)
        or name.partition(".")[2].startswith(_ALLOCATES)
    )


def _touched_tensors(operator: Operator, operands: Any, result: object) -> list[torch.Tensor]:
    """Lists the tensors that an operator reads and writes; written operands come twice."""
    args, kwargs = operands
    read = _unique_tensors((args, kwargs))
    written = _unique_tensors(torch_private.written_operands(operator, args, kwargs))
    memories = {torch_private.memory_of(tensor) for tensor in read}
    made = [
        tensor for tensor in _tensors_in(result) if torch_private.memory_of(tensor) not in memories
    ]
    return [*read, *written, *made]


def _unique_tensors(nest: object) -> list[torch.Tensor]:
    unique: dict[Hashable, torch.Tensor] = {}
    for tensor in _tensors_in(nest):
        memory = torch_private.memory_of(tensor), tensor.storage_offset()
        unique[*memory, tuple(tensor.shape), tensor.stride(), tensor.dtype] = tensor
    return list(unique.values())


def _size_of(tensor: torch.Tensor) -> int:
    """Counts the bytes of a tensor in memory; expanded dims count once."""
    return int(min(tensor.nbytes, tensor.untyped_storage().nbytes()))


def _dtype_of(nest: object) -> str:
    """Chooses the dtype in which an operator computes: that of its first floating tensor."""
    tensors = _tensors_in(nest)
    floating = (tensor for tensor in tensors if tensor.dtype.is_floating_point)
    return str(next(floating, tensors[0]).dtype).removeprefix("torch.")


def _tensors_in(nest: object) -> list[torch.Tensor]:
    """Leaves out tensors without elements."""
    leaves = torch_private.tree_leaves(nest)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel()]
