"""The collectives of a piece of code: counted, or each with its layer, operator and tensor."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch.utils.weak import WeakIdKeyDictionary

from shardcore.adapters import torch_private
from shardcore.adapters.engine import writes
from shardcore.domain.cost.reasons import CollectiveFacts
from shardcore.ports.measurement import layer_scope, redistribution_scope, reduction_scope


@attrs.frozen
class Traffic:
    """The collectives of a piece of code, by name: "all_reduce", "all_gather", ..."""

    # The number of collectives that this rank started.
    calls: Counter[str] = attrs.field(factory=Counter)
    # The total bytes of this rank's operands.
    operand_bytes: Counter[str] = attrs.field(factory=Counter)

    def add(self, started: torch_private.CollectiveCall) -> None:
        """Counts one collective."""
        self.calls[started.name] += 1
        self.operand_bytes[started.name] += started.operand_bytes


@contextmanager
def count_collectives() -> Iterator[Traffic]:
    """Counts the collectives of tensors that this thread starts in the context.

    Yields:
        The counts, which grow.
    """
    traffic = Traffic()
    with torch_private.CollectiveListener(traffic.add):
        yield traffic


@attrs.frozen
class _RunningOperator:
    """The outermost running operator on sharded tensors, and the number of fall-backs before it."""

    name: str
    operands: object
    fallbacks: int


class StepTracer:
    """The port `CollectiveTracer`, which watches every operator.

    Args:
        listen: Called with each collective.
        variables: The tensors of the variables, by path.
        values: Whether the step runs with values.
    """

    def __init__(
        self,
        listen: Callable[[CollectiveFacts], None],
        variables: Mapping[str, torch.Tensor],
        *,
        values: bool = True,
    ) -> None:
        self._listen = listen
        self._values = values
        # By the `id` of the parameter, and by the memory of this rank's part of it.
        self._paths = {id(variable): path for path, variable in variables.items()}
        self._memories = {
            torch_private.memory_of(_part(variable)): path for path, variable in variables.items()
        }
        self._running: _RunningOperator | None = None
        self._turns: list[tuple[int, str]] = []
        self._made_of: Any = WeakIdKeyDictionary()

    def tracing(self) -> AbstractContextManager[Any]:
        """Opens a context in which collectives are seen."""
        return torch_private.CollectiveListener(
            self._on_collective, self._operator_scope, values=self._values
        )

    @contextmanager
    def layer(self, layer: str) -> Iterator[None]:
        """Opens the call of the layer at the path `layer`, which owns its backward pass."""
        before = self._turns[-1][1] if self._turns else ""
        self._turns.append((torch_private.count_nodes(), layer))
        try:
            yield
        finally:
            self._turns.append((torch_private.count_nodes(), before))

    def _on_collective(self, started: torch_private.CollectiveCall) -> None:
        move, running = redistribution_scope.now(), self._running
        self._listen(
            CollectiveFacts(
                "send" if move is not None and move.to_next else started.name,
                "backward" if torch_private.backward_pass() >= 0 else "forward",
                processes=started.processes,
                operand_bytes=started.operand_bytes,
                layer=self._layer(),
                operator=running.name if running else "",
                fell_back=bool(
                    running and writes.count_fallbacks(running.operands) > running.fallbacks
                ),
                shape=None if move is None else move.shape,
                source=None if move is None else move.source,
                target=None if move is None else move.target,
                variable=None if move is None else self._variable(move.part),
                reduced=self._reduced(),
            )
        )

    def _layer(self) -> str:
        """Finds the path of the layer that is called, or whose backward node runs."""
        node = torch_private.current_node()
        if layer_scope.now() or node is None:
            return layer_scope.now()
        at = bisect_right(self._turns, node, key=lambda turn: turn[0])
        return self._turns[at - 1][1] if at else ""

    def _reduced(self) -> tuple[str, ...]:
        leaf = torch_private.accumulating_leaf()
        parameters = reduction_scope.now() or (() if leaf is None else (leaf,))
        return tuple(
            self._paths[id(parameter)] for parameter in parameters if id(parameter) in self._paths
        )

    @contextmanager
    def _operator_scope(
        self, operator: object, operands: object
    ) -> Iterator[Callable[[Any], None]]:
        outer = self._running
        if outer is None:
            self._running = _RunningOperator(
                str(operator), operands, writes.count_fallbacks(operands)
            )
        try:
            yield lambda result: self._note(operands, result)
        finally:
            self._running = outer

    def _note(self, operands: object, result: object) -> None:
        """Notes that `result` is a cast or a view of a variable, whose name it gets."""
        tensors = _tensors(operands)
        sharded = [tensor for tensor in tensors if hasattr(tensor, "placements")]
        sources = {self._variable(_part(tensor)) for tensor in sharded}
        if len(sources) != 1 or None in sources or len(tensors) > len(sharded):
            return
        for tensor in _tensors(result):
            if hasattr(tensor, "placements"):
                self._made_of[_part(tensor)] = next(iter(sources))

    def _variable(self, part: torch.Tensor) -> str | None:
        path: str | None = self._made_of.get(part)
        return path or self._memories.get(torch_private.memory_of(part))


def _tensors(structure: object) -> list[torch.Tensor]:
    leaves = torch_private.tree_leaves(structure)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _part(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
