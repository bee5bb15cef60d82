"""Every collective of a stretch of code: how many, and what each was for, where that is seen."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch.utils.weak import WeakIdKeyDictionary

from shardcore.adapters import fallback, torch_compat
from shardcore.ports.whereabouts import Seen, current_layer, current_move, currently_reduced


@attrs.frozen
class Traffic:
    """The collectives of a stretch of code, by name: "all_reduce", "all_gather", ...

    Args:
        calls: How often each was started by this rank.
        operand_bytes: The bytes of this rank's operands, in all.
    """

    calls: Counter[str] = attrs.field(factory=Counter)
    operand_bytes: Counter[str] = attrs.field(factory=Counter)

    def add(self, started: torch_compat.Started) -> None:
        """Count one collective."""
        self.calls[started.name] += 1
        self.operand_bytes[started.name] += started.operand_bytes


@contextmanager
def count_collectives() -> Iterator[Traffic]:
    """Count the collectives of tensors that this thread starts inside.

    Yields:
        The counts, growing.
    """
    traffic = Traffic()
    with torch_compat.CollectiveListener(traffic.add):
        yield traffic


@attrs.frozen
class _Running:
    """The outermost operator on sharded tensors that runs, and the fall-backs before it."""

    name: str
    operands: Any
    fallbacks: int


@attrs.define(eq=False)
class StepWitness:
    """The port `Witness`, by watching every operator.

    Args:
        tell: Called with each.
        paths: The paths of the variables, by the `id` of the parameter that each keeps.
        parts: The same, by where this rank's part of each lies in memory.
    """

    tell: Callable[[Seen], None]
    paths: Mapping[int, str]
    parts: Mapping[int, str]
    _running: _Running | None = attrs.field(default=None, init=False)
    _turns: list[tuple[int, str]] = attrs.field(factory=list, init=False)
    _made_of: Any = attrs.field(factory=WeakIdKeyDictionary, init=False)

    @classmethod
    def of(
        cls, tell: Callable[[Seen], None], variables: Mapping[str, torch.Tensor]
    ) -> "StepWitness":
        """A witness that knows `variables`: the sharded tensors by path."""
        paths = {id(each): path for path, each in variables.items()}
        places = {path: _place(_part(each)) for path, each in variables.items()}
        return cls(tell, paths, {place: path for path, place in places.items() if place})

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Collectives are seen inside."""
        with torch_compat.OperatorWatch(self._saw, self._around):
            yield

    @contextmanager
    def inside(self, layer: str) -> Iterator[None]:
        """The call of the layer at the path `layer`: what it computes has a backward of its own."""
        before = self._turns[-1][1] if self._turns else ""
        self._turns.append((torch_compat.nodes_made(), layer))
        try:
            yield
        finally:
            self._turns.append((torch_compat.nodes_made(), before))

    def _saw(self, started: torch_compat.Started) -> None:
        move, running = current_move(), self._running
        self.tell(
            Seen(
                started.name,
                started.processes,
                started.operand_bytes,
                torch_compat.backward_pass() >= 0,
                self._layer(),
                None if running is None else running.name,
                running is not None and fallback.count(running.operands) > running.fallbacks,
                move,
                None if move is None else self._variable(move.part),
                self._reduced(),
            )
        )

    def _layer(self) -> str:
        """In a backward pass no layer is called, but for one that is computed again."""
        node = torch_compat.current_node()
        if current_layer() or node is None:
            return current_layer()
        at = bisect_right(self._turns, node, key=lambda turn: turn[0])
        return self._turns[at - 1][1] if at else ""

    def _reduced(self) -> tuple[str, ...]:
        leaf = torch_compat.accumulated()
        parameters = currently_reduced() or (() if leaf is None else (leaf,))
        return tuple(self.paths[id(each)] for each in parameters if id(each) in self.paths)

    @contextmanager
    def _around(self, operator: Any, operands: Any) -> Iterator[Callable[[Any], None]]:
        outer = self._running
        if outer is None:
            self._running = _Running(str(operator), operands, fallback.count(operands))
        try:
            yield lambda result: self._note(operands, result)
        finally:
            self._running = outer

    def _note(self, operands: Any, result: Any) -> None:
        """A cast or a view of a variable is taken for the variable."""
        tensors = _tensors(operands)
        sharded = [each for each in tensors if hasattr(each, "placements")]
        sources = {self._variable(_part(each)) for each in sharded}
        if len(sources) != 1 or None in sources or len(tensors) > len(sharded):
            return
        for each in _tensors(result):
            if hasattr(each, "placements"):
                self._made_of[_part(each)] = next(iter(sources))

    def _variable(self, part: torch.Tensor) -> str | None:
        path: str | None = self._made_of.get(part) or self.parts.get(_place(part))
        return path


def _tensors(structure: Any) -> list[torch.Tensor]:
    leaves = torch_compat.tree_leaves(structure)
    return [each for each in leaves if isinstance(each, torch.Tensor)]


def _part(tensor: Any) -> torch.Tensor:
    """What this rank has of a sharded tensor."""
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _place(part: torch.Tensor) -> int:
    """Where a tensor lies in memory; 0 if it has no element."""
    return part.untyped_storage().data_ptr()
