"""The values of a trace: which value a tensor or a generator is, and which memory it has."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.trace import Form, Trace, Value, numbered
from shardcore.adapters.torch_private import Args, Kwargs

# A larger tensor from outside is not copied: it is a constant only if no call writes into it.
_MOST_ELEMENTS = 65536


@attrs.define(eq=False)
class RecordedValues:
    """The values of a trace that is being recorded, by the things that they stand for.

    Args:
        trace: The trace, which gets the form and the memory of each value.
        refuse: Notes why no program can be made of the step, and what to do.
        paused: Opens a context in which nothing is recorded.
    """

    trace: Trace
    refuse: Callable[[str, str], None]
    paused: Callable[[], AbstractContextManager[None]]
    _values: dict[int, tuple[Any, Value]] = attrs.field(factory=dict, init=False)
    _generators: dict[int, tuple[Value, torch.Generator]] = attrs.field(factory=dict, init=False)
    _outside_memories: dict[int | None, int] = attrs.field(factory=dict, init=False)
    # By number, the identity of the memory of a value.
    _identities: list[int | None] = attrs.field(factory=list, init=False)
    # The operands of the operator that runs.
    _operands: list[Value] = attrs.field(factory=list, init=False)

    def operands(self, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        """Converts operands to values of the trace; `results` looks for memory at these."""
        self._operands.clear()
        return self.values_in(args), self.values_in(kwargs) if kwargs else {}

    def results(self, result: Any) -> Any:
        """Makes values of the results of an operator; most have one, which is a tensor."""
        if _is_value(result.__class__):
            return self._value_of_result(result)
        return torch_private.tree_map(self._value_of_result, result)

    def values_in(self, nest: Any) -> Any:
        """Replaces the tensors and generators in `nest` by values of the trace."""
        return torch_private.tree_map(self._reference, nest)

    def _reference(self, leaf: Any) -> Any:
        if leaf.__class__ is not torch.Tensor and not _is_value(leaf.__class__):
            return leaf
        value = self.value(leaf)
        self._operands.append(value)
        return value

    def value(self, thing: Any) -> Value:
        """Looks up a tensor or generator; an unknown one is from outside the step."""
        if recorded := self._values.get(id(thing)):  # most are: a call less for each operand
            return recorded[1]
        known = self.find(thing)
        if known is None:
            known = self.from_outside(thing)
            self.trace.outside[known.number] = thing
            if (
                torch.is_tensor(thing)
                and thing.numel() <= _MOST_ELEMENTS
                and not self.trace.refusal
            ):
                with self.paused(), torch.no_grad():
                    self.trace.first_values[known.number] = thing.detach().clone()
        return known

    def find(self, thing: Any) -> Value | None:
        """Looks up a tensor or generator; None if the trace has none yet."""
        recorded = self._values.get(id(thing))
        if recorded is not None:
            return recorded[1]
        if type(thing) is torch.Generator:
            return self._generators.get(torch_private.identity_of(thing), (None,))[0]
        return None

    def _value_of_result(self, leaf: Any) -> Any:
        """Adds a result; its memory is new, or that of an operand or a variable."""
        if not _is_value(leaf.__class__):
            return leaf
        known = self.find(leaf)
        memory = self._memory_of(leaf)
        if known is not None:
            self.trace.reshapes |= self.trace.forms[known.number] != Form.of(leaf)
            self._identities[known.number] = memory
            return known
        for value in self._operands:
            if memory is not None and self._identities[value.number] == memory:
                return self._new(leaf, memory, self.trace.memory[value.number])
        return self._new(leaf, memory, self._outside_memories.get(memory))

    def from_outside(self, thing: Any) -> Value:
        """Adds a tensor from outside, of which others may be views."""
        memory = self._memory_of(thing)
        value = self._new(thing, memory, self._outside_memories.get(memory))
        if memory is not None:
            self._outside_memories.setdefault(memory, value.number)
        return value

    def _memory_of(self, thing: Any) -> int | None:
        """Identifies the memory of a tensor; None of a generator."""
        if type(thing) is torch.Generator:
            return None
        if thing.layout is not torch.strided:
            self.refuse("it computes with a sparse tensor", "make it dense: tensor.to_dense()")
            return None
        return torch_private.memory_of(thing)

    def _new(self, thing: Any, memory: int | None, owner: int | None) -> Value:
        value = numbered(len(self.trace.memory))
        self._identities.append(memory)
        self.trace.memory.append(value.number if owner is None else owner)
        self.trace.forms.append(Form.of(thing))
        if torch.is_tensor(thing):
            self.bind(thing, value)
        else:
            self._generators[torch_private.identity_of(thing)] = value, thing
        return value

    def bind(self, tensor: torch.Tensor, value: Value) -> None:
        """Binds a tensor to its value, by identity, which a later tensor may get again."""
        key = id(tensor)
        self._values[key] = weakref.ref(tensor, lambda _: self._values.pop(key, None)), value

    def forget(self, tensor: torch.Tensor) -> None:
        """Drops the value of a tensor, which from now on stands for another value."""
        self._values.pop(id(tensor), None)

    def tensor_in(self, memory: int) -> torch.Tensor | None:
        """Finds a tensor of the trace in this memory; None if there is none."""
        tensors = [reference() for reference, _ in self._values.values()]
        return next((tensor for tensor in tensors if _has_memory(tensor, memory)), None)


@cache
def _is_value(kind: type) -> bool:
    """Decides by class: in torch 2.13 `isinstance` of a generator runs Python code."""
    return issubclass(kind, torch.Tensor | torch.Generator)


def _has_memory(thing: Any, memory: int) -> bool:
    is_dense = torch.is_tensor(thing) and thing.layout is torch.strided
    return is_dense and torch_private.memory_of(thing) == memory
