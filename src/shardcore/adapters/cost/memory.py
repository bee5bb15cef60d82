"""The memory that a step takes, from a run on tensors without values (ADR 39)."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.domain.cost.events import Allocation, Kind
from shardcore.domain.garbage import without_collection


@attrs.define(eq=False)
class StepMemory:
    """The port `MemoryTracer`: it watches the results of all operators, and their storages."""

    _made: list[Allocation] = attrs.field(factory=list, init=False)
    _held: dict[int, int] = attrs.field(factory=dict, init=False)  # by identity, its number
    _time: int = attrs.field(default=0, init=False)
    _without_values: torch_private.WithoutValues = attrs.field(
        factory=torch_private.WithoutValues, init=False
    )

    def without_values(self) -> AbstractContextManager[Any]:
        """Opens the context in which tensors have shapes and no values, and nothing is computed."""
        return self._without_values

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Opens a context in which the results of operators are noted.

        New garbage is collected at each operator; a cycle that outlives one counts until the end.
        Python collects after some number of new objects: equal parts of a step would free what is
        in reference cycles at different times.
        """

        def listen(*operator: Any) -> None:
            gc.collect(0)
            self._on_operator(*operator)

        with without_collection(), torch_private.ResultListener(listen):
            yield

    def hold(self, tensor: torch.Tensor, kind: Kind) -> int:
        """Notes the memory of a plain tensor and its use; a known tensor gets the new use.

        Returns:
            The number of its allocation.
        """
        memory = torch_private.memory_of(tensor)
        number = self._held.get(memory)
        if number is not None:
            self._made[number] = attrs.evolve(self._made[number], kind=kind)
            return number
        storage = tensor.untyped_storage()
        self._time += 1
        self._held[memory] = len(self._made)
        self._made.append(Allocation(kind, storage.nbytes(), self._time))
        weakref.finalize(storage, self._free, memory).atexit = False
        return self._held[memory]

    def allocations(self) -> list[Allocation]:
        """Lists all allocations so far, freed ones too, in the order of `hold`'s numbers."""
        return list(self._made)

    def _on_operator(
        self, operator: torch_private.Operator, _operands: object, result: object
    ) -> None:
        kind: Kind = "collectives" if torch_private.is_of_collectives(operator) else "activations"
        for tensor in filter(_has_memory, torch_private.tree_leaves(result)):
            if torch_private.memory_of(tensor) not in self._held:
                self.hold(tensor, kind)

    def _free(self, memory: int) -> None:
        self._time += 1
        number = self._held.pop(memory)
        self._made[number] = attrs.evolve(self._made[number], end=self._time)


def _has_memory(leaf: Any) -> bool:
    """Leaves out the meta device, whose tensors have shapes alone."""
    is_tensor = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    return is_tensor and leaf.device.type != "meta"
