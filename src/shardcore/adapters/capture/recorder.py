"""Records the tape of a step while the step runs."""

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from cProfile import Profile
from functools import cache
from typing import Any

import numpy as np
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.functions import (
    NUMBERS,
    FunctionListener,
    Unobserved,
    generator_states,
)
from shardcore.adapters.capture.places import place
from shardcore.adapters.capture.tape import Call, Form, Number, Read, Tape, Value, numbered
from shardcore.adapters.torch_private import Args, Kwargs
from shardcore.ports.capture import Observer


class Recorder:
    """Records one run of a step, which runs eagerly.

    Args:
        inputs: The plain tensors of the batch.
        observer: Enabled while functions of the step run; by default a profile that is dropped.
    """

    def __init__(self, inputs: Sequence[Any], observer: Observer | None = None) -> None:
        self.tape = Tape()
        self._observer = observer or Profile(subcalls=False, builtins=False)
        self._values: dict[int, tuple[Any, Value]] = {}
        self._generators: dict[int, tuple[Value, torch.Generator]] = {}
        self._kept_memories: dict[int | None, int] = {}
        self._identities: list[int | None] = []  # by number, that of the memory of a value
        self._met: list[Value] = []  # the operands of the operator that runs
        self._inputs = inputs  # kept alive: no other tensor gets their memory
        self._busy = False
        # By their text, the numbers that torch reads from tensors in a call; and those it uses.
        self._taken: dict[str, tuple[torch.Tensor, Any]] | None = None
        self._used: set[str] = set()
        self._drawn = generator_states()
        self.tape.inputs = [self._from_outside(each) for each in inputs]

    def run(self, step: Callable[[], Any]) -> Any:
        """Returns the result of `step`; `tape` is its recording."""
        assert recording() is None, "a step is being recorded already"
        before = _recording.set(self)
        host = _host_generators()
        try:
            unobserved = Unobserved(self._observer)
            functions = FunctionListener(self.read, self.numbers, self.at_once, unobserved)
            listener = torch_private.OperatorListener(self._begin, self._end, unobserved)
            with listener, functions:
                self._observer.enable()
                outputs = step()
        finally:
            self._observer.disable()
            _recording.reset(before)
        self.tape.draws_on_host = _host_generators() != host
        self._check_generator()
        if not self.tape.refusal:
            self.tape.outputs = self._referred(outputs)
        return outputs

    def _check_generator(self) -> None:
        """Checks that draws alone changed torch's generators: no operator sets their state."""
        states = generator_states()
        if len(states) != len(self._drawn) or not all(map(torch.equal, states, self._drawn)):
            self.refuse("the state of torch's random generator is set in the step", _DRAW)

    def refuse(self, why: str, remedy: str) -> None:
        """Notes why no program can be made of the step, and what to do; the first reason counts."""
        if not self.tape.refusal:
            self.tape.refusal = f"{why}, at {place()}: {remedy}"

    @contextmanager
    def numbers(self) -> Iterator[None]:
        """Covers a call in which torch reads a number from a tensor that is a named operand."""
        taken = self._taken = {}
        self._used.clear()
        try:
            yield
        finally:
            self._taken = None
        for text, (tensor, number) in taken.items():
            if text not in self._used:  # by no operator as a named operand: as by float(x)
                self.read(tensor, "a number taken of a tensor", number)

    def read(self, tensor: Any, how: str, number: Any = None) -> None:
        """Notes that values are read on the host, which a program may repeat for constants only."""
        if self._busy or self.tape.refusal:
            return
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            self.refuse(f"{how} reads the values of a sharded tensor on the host", _COMPUTE)
            return
        read = Read(self._value(tensor), number, len(self.tape.calls), f"{how} at {place()}")
        self.tape.reads.append(read)

    def _begin(self, operator: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any] | None:
        """Returns the operands as values of the tape; None if nothing is recorded.

        It runs before the operator: tensors from outside are copied before it writes into them.
        """
        if self._busy or self.tape.refusal:
            return None
        if torch_private.draws(operator):
            self._check_generator()
            if kwargs.get("generator") is not None and self._known(kwargs["generator"]) is None:
                self.refuse("it draws from a torch.Generator that it created", _DRAW)
        references = self._operands(args, kwargs)
        return None if self.tape.refusal else references

    def _end(self, operator: Any, args: Args, kwargs: Kwargs, references: Any, result: Any) -> None:
        """Notes an operator that has run."""
        if torch_private.draws(operator):
            self._drawn = generator_states()
        if operator is torch_private.ITEM and self._taken is not None:
            self._taken[repr(result)] = args[0], result
            return
        if torch_private.reads_values(operator, args):
            for each in filter(torch.is_tensor, torch_private.tree_leaves((args, kwargs))):
                number = result if operator is torch_private.ITEM else None
                self.read(each, str(operator), number)
            if not any(map(torch.is_tensor, torch_private.tree_leaves(result))):
                return
        if operator in _SETS_STORAGE:
            self._append_view_of_storage(result)
            return
        is_alias = operator in _ALIASES or torch_private.is_wait(operator)
        if is_alias or (operator is _VIEW_AS and args[0] is args[1]):
            self._name(result, references[0][0])
            return
        self._append(operator, args, kwargs, references, result)

    def _append(
        self, operator: Any, args: Args, kwargs: Kwargs, references: tuple[Any, Any], result: Any
    ) -> None:
        taken = self._taken or {}
        for name in kwargs.keys() & NUMBERS if taken else ():
            text = repr(kwargs[name])
            if text in taken:
                self._used.add(text)
                references[1][name] = Number(self._value(taken[text][0]))
        writes = tuple(map(self._value, torch_private.written_operands(operator, args, kwargs)))
        made = torch_private.tree_map(self._made, result)
        backward = torch_private.backward_pass() >= 0
        self.tape.calls.append(Call(operator, *references, made, writes, place(), backward))

    def _append_view_of_storage(self, result: torch.Tensor) -> None:
        """Notes `empty(0).set_(storage, ...)` as a view of a tensor there.

        So torch looks for the weights of a recurrent layer in one storage, for cuDNN. Of sharded
        tensors, whose storage has no memory, it makes a tensor that it drops.
        """
        self._values.pop(id(result), None)  # it was another tensor
        base = self._tensor_in(torch_private.memory_of(result))
        if base is not None:
            shape = (list(result.shape), list(result.stride()), result.storage_offset())
            operands = (base, *shape)
            self._append(_AS_STRIDED, operands, {}, self._operands(operands, {}), result)
        elif result.untyped_storage().data_ptr():
            self.refuse("a tensor gets the storage of another one", "make a view of it")

    def _tensor_in(self, memory: int) -> torch.Tensor | None:
        """Returns a tensor of the tape in this memory; None if there is none."""
        met = [reference() for reference, _ in self._values.values()]
        return next((each for each in met if _has_memory(each, memory)), None)

    def at_once(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        """Returns the result of `function`, which becomes one call of the tape."""
        if self._busy or self.tape.refusal:
            return function(*args, **kwargs)
        with self.unheard():
            result = function(*args, **kwargs)
        self._append(function, args, kwargs, self._operands(args, kwargs), result)
        if torch_private.draws(function):
            self._drawn = generator_states()
        return result

    def append(self, operator: Any, args: Args, result: torch.Tensor) -> None:
        """Records an operator that does not run itself: unrecorded ones compute its `result`."""
        if not self._busy and not self.tape.refusal:
            self._append(operator, args, {}, self._operands(args, {}), result)

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Pauses the recording."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _operands(self, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        """Returns operands as values of the tape, and notes these for the results."""
        self._met.clear()
        return self._referred(args), self._referred(kwargs) if kwargs else {}

    def _referred(self, nest: Any) -> Any:
        return torch_private.tree_map(self._reference, nest)

    def _reference(self, leaf: Any) -> Any:
        if not _is_value(leaf.__class__):
            return leaf
        value = self._value(leaf)
        self._met.append(value)
        return value

    def _value(self, thing: Any) -> Value:
        """Returns the value of a tensor or generator; an unknown one is from outside the step."""
        if found := self._values.get(id(thing)):  # most are: a call less for each operand
            return found[1]
        known = self._known(thing)
        if known is None:
            known = self._from_outside(thing)
            self.tape.outside[known.number] = thing
            if torch.is_tensor(thing) and thing.numel() <= _MOST_ELEMENTS and not self.tape.refusal:
                with self.unheard(), torch.no_grad():
                    self.tape.found[known.number] = thing.detach().clone()
        return known

    def _known(self, thing: Any) -> Value | None:
        found = self._values.get(id(thing))
        if found is not None:
            return found[1]
        if type(thing) is torch.Generator:
            return self._generators.get(torch_private.identity_of(thing), (None,))[0]
        return None

    def _made(self, leaf: Any) -> Any:
        """Returns the value of a result; its memory is new, or that of an operand or a variable."""
        if not _is_value(leaf.__class__):
            return leaf
        known = self._known(leaf)
        memory = self._memory_of(leaf)
        if known is not None:
            self.tape.reshapes |= self.tape.forms[known.number] != Form.of(leaf)
            self._identities[known.number] = memory
            return known
        for each in self._met:
            if memory is not None and self._identities[each.number] == memory:
                return self._new(leaf, memory, self.tape.memory[each.number])
        return self._new(leaf, memory, self._kept_memories.get(memory))

    def _from_outside(self, thing: Any) -> Value:
        """Returns a new value for a tensor from outside, of which others may be views."""
        memory = self._memory_of(thing)
        value = self._new(thing, memory, self._kept_memories.get(memory))
        if memory is not None:
            self._kept_memories.setdefault(memory, value.number)
        return value

    def _memory_of(self, thing: Any) -> int | None:
        """Returns the identity of the memory of a tensor; None of a generator."""
        if type(thing) is torch.Generator:
            return None
        if thing.layout is not torch.strided:
            self.refuse("it computes with a sparse tensor", "make it dense: tensor.to_dense()")
            return None
        return torch_private.memory_of(thing)

    def _new(self, thing: Any, memory: int | None, owner: int | None) -> Value:
        value = numbered(len(self.tape.memory))
        self._identities.append(memory)
        self.tape.memory.append(value.number if owner is None else owner)
        self.tape.forms.append(Form.of(thing))
        if torch.is_tensor(thing):
            self._name(thing, value)
        else:
            self._generators[torch_private.identity_of(thing)] = value, thing
        return value

    def _name(self, tensor: torch.Tensor, value: Value) -> None:
        """Notes the value of a tensor by its identity, which a new tensor may get after it."""
        key = id(tensor)
        self._values[key] = weakref.ref(tensor, lambda _: self._values.pop(key, None)), value


@cache
def _is_value(kind: type) -> bool:
    """Returns whether objects of this class are values of a tape.

    By class: in torch 2.13 `isinstance` of a generator runs Python code.
    """
    return issubclass(kind, torch.Tensor | torch.Generator)


def _has_memory(thing: Any, memory: int) -> bool:
    is_dense = torch.is_tensor(thing) and thing.layout is torch.strided
    return is_dense and torch_private.memory_of(thing) == memory


_SETS_STORAGE = {
    torch.ops.aten.set_.source_Storage_storage_offset,
    torch.ops.aten.set_.source_Storage,
}
_AS_STRIDED = torch.ops.aten.as_strided.default

# Their results are the operand: they concern autograd alone, and are not on the tape. Neither is a
# wait for a collective: it ends where its result is read first.
_ALIASES = {
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.detach_.default,
    torch.ops.aten.lift_fresh.default,
}
_VIEW_AS = torch.ops.aten.view_as.default

# A larger tensor from outside is not copied: it is a constant only if no call writes into it.
_MOST_ELEMENTS = 65536

# Set while this thread records a step: gradient hooks, which autograd calls, ask for it.
_recording: ContextVar[Recorder | None] = ContextVar("recording", default=None)


def recording() -> Recorder | None:
    """Returns the recorder of the step that this thread records, None without one."""
    return _recording.get()


def _host_generators() -> Any:
    """Returns the states of the generators of Python and NumPy."""
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"]


_COMPUTE = "compute with keras.ops, which keeps values in tensors"
_DRAW = "draw by keras.random, with a SeedGenerator of the layer"
