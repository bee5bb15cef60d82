"""Records the trace of a step while the step runs."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import attrs
import numpy as np
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.recording import functions
from shardcore.adapters.capture.recording.values import RecordedValues
from shardcore.adapters.capture.trace import Call, Number, Read, Trace, Value
from shardcore.adapters.source_line import source_line
from shardcore.adapters.torch_private import Args, Kwargs
from shardcore.ports.capture import Observer


class _NoObserver:
    """An observer that notes nothing."""

    def enable(self) -> None: ...

    def disable(self) -> None: ...


class Recorder:
    """Records one run of a step, which runs eagerly.

    Args:
        inputs: The plain tensors of the batch.
        observer: Enabled while functions of the step run.
    """

    def __init__(self, inputs: Sequence[Any], observer: Observer | None = None) -> None:
        self.trace = Trace()
        self._observer = observer or _NoObserver()
        self._values = RecordedValues(self.trace, self.refuse, self.paused)
        self._inputs = inputs  # kept alive: no other tensor gets their memory
        self._busy = False
        # By their text, the numbers that torch reads from tensors in a call; and those it uses.
        self._taken: dict[str, tuple[torch.Tensor, Any]] | None = None
        self._used: set[str] = set()
        self._drawn = functions.generator_states()
        self.trace.inputs = [self._values.from_outside(tensor) for tensor in inputs]

    def run(self, step: Callable[[], Any]) -> Any:
        """Runs `step`, and records it in `trace`."""
        assert recording() is None, "a step is being recorded already"
        before = _recording.set(self)
        host = _host_generator_states()
        try:
            unobserved = functions.Unobserved(self._observer)
            function_listener = functions.FunctionListener(
                self.read, self.refuse, self.numbers, self.as_one_call, unobserved
            )
            with self._listener(unobserved), function_listener:
                self._observer.enable()
                outputs = step()
        finally:
            self._observer.disable()
            _recording.reset(before)
        self.trace.draws_on_host = _host_generator_states() != host
        self._check_generator()
        if not self.trace.refusal:
            self.trace.outputs = self._values.values_in(outputs)
        return outputs

    def _listener(self, unobserved: functions.Unobserved) -> AbstractContextManager[Any]:
        return torch_private.OperatorListener(self._begin, self._end, unobserved)

    def _check_generator(self) -> None:
        """Checks that draws alone changed torch's generators: no operator sets their state."""
        with self.paused():
            states = functions.generator_states()
            is_changed = len(states) != len(self._drawn) or not all(
                map(torch.equal, states, self._drawn)
            )
        if is_changed:
            self.refuse("the state of torch's random generator is set in the step", _DRAW)

    def _note_drawn(self) -> None:
        with self.paused():
            self._drawn = functions.generator_states()

    def refuse(self, why: str, remedy: str) -> None:
        """Notes why no program can be made of the step, and what to do; the first reason counts.

        A step of which something is not seen runs eagerly (ADR 55).
        """
        if not self.trace.refusal:
            self.trace.refusal = f"{why}, at {source_line()}: {remedy}"

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

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """Looks up a plain tensor in the trace; None if it is not there."""
        return self._values.find(tensor)

    def read(self, tensor: Any, how: str, number: Any = None) -> None:
        """Notes that values are read on the host, which a program may repeat for constants only."""
        if self._busy or self.trace.refusal:
            return
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            self.refuse(f"{how} reads the values of a sharded tensor on the host", _COMPUTE)
            return
        read = Read(
            self._values.value(tensor), number, len(self.trace.calls), f"{how} at {source_line()}"
        )
        self._note_read(read)

    def _begin(self, operator: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any] | None:
        """Converts the operands to values of the trace; None if nothing is recorded.

        It runs before the operator: tensors from outside are copied before it writes into them.
        """
        if self._busy or self.trace.refusal:
            return None
        if _kind_of(operator).draws:
            self._check_generator()
            generator = kwargs.get("generator")
            if generator is not None and self._values.find(generator) is None:
                self.refuse("it draws from a torch.Generator that it created", _DRAW)
        references = self._values.operands(args, kwargs)
        return None if self.trace.refusal else references

    def _end(self, operator: Any, args: Args, kwargs: Kwargs, references: Any, result: Any) -> None:
        kind = _kind_of(operator)
        if kind.draws:
            self._note_drawn()
        if operator is torch_private.ITEM and self._taken is not None:
            self._taken[repr(result)] = args[0], result
            return
        if kind.may_read and torch_private.reads_values(operator, args):
            for tensor in filter(torch.is_tensor, torch_private.tree_leaves((args, kwargs))):
                number = result if operator is torch_private.ITEM else None
                self.read(tensor, str(operator), number)
            if not any(map(torch.is_tensor, torch_private.tree_leaves(result))):
                return
        if kind.sets_storage:
            self._append_view_of_storage(result)
            return
        if kind.is_alias or (operator is _VIEW_AS and args[0] is args[1]):
            self._values.bind(result, references[0][0])
            return
        self._append(operator, args, kwargs, references, result)

    def _append(
        self, operator: Any, args: Args, kwargs: Kwargs, references: tuple[Any, Any], result: Any
    ) -> None:
        taken = self._taken or {}
        for name in kwargs.keys() & functions.NUMBERS if taken else ():
            text = repr(kwargs[name])
            if text in taken:
                self._used.add(text)
                references[1][name] = Number(self._values.value(taken[text][0]))
        writes: tuple[Value, ...] = ()
        if _kind_of(operator).writes:
            written = torch_private.written_operands(operator, args, kwargs)
            writes = tuple(map(self._values.value, written))
        made = self._values.results(result)
        backward = torch_private.backward_pass() >= 0
        self._note_call(Call(operator, *references, made, writes, source_line(backward), backward))

    def _note_call(self, call: Call) -> None:
        """Notes one operator; an audit compares it instead."""
        self.trace.calls.append(call)

    def _note_read(self, read: Read) -> None:
        self.trace.reads.append(read)

    def _append_view_of_storage(self, result: torch.Tensor) -> None:
        """Notes `empty(0).set_(storage, ...)` as a view of a tensor there.

        cuDNN's recurrent layers probe in this way whether all weights share one storage. For
        sharded tensors, whose storage has no memory, torch drops the result.
        """
        self._values.forget(result)  # it was another tensor
        base = self._values.tensor_in(torch_private.memory_of(result))
        if base is not None:
            shape = (list(result.shape), list(result.stride()), result.storage_offset())
            operands = (base, *shape)
            self._append(_AS_STRIDED, operands, {}, self._values.operands(operands, {}), result)
        elif result.untyped_storage().data_ptr():
            self.refuse("a tensor gets the storage of another one", "make a view of it")

    def as_one_call(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        """Runs `function`, which becomes one call of the trace."""
        if self._busy or self.trace.refusal:
            return function(*args, **kwargs)
        with self.paused():
            result = self._compute(function, args, kwargs)
        self._append(function, args, kwargs, self._values.operands(args, kwargs), result)
        if torch_private.draws(function):
            self._note_drawn()
        return result

    def _compute(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        return function(*args, **kwargs)

    def append(self, operator: Any, args: Args, result: torch.Tensor) -> None:
        """Records an operator that does not run itself: unrecorded ones compute its `result`."""
        if not self._busy and not self.trace.refusal:
            self._append(operator, args, {}, self._values.operands(args, {}), result)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses the recording."""
        was_busy, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = was_busy


_SETS_STORAGE = {
    torch.ops.aten.set_.source_Storage_storage_offset,
    torch.ops.aten.set_.source_Storage,
}
_AS_STRIDED = torch.ops.aten.as_strided.default

# Their results are the operand: they concern autograd alone, and are not on the trace. Neither is a
# wait for a collective: it ends where its result is read first.
_ALIASES = {
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.detach_.default,
    torch.ops.aten.lift_fresh.default,
}
_VIEW_AS = torch.ops.aten.view_as.default


@attrs.frozen(eq=False)
class _Kind:
    """Properties of an operator, in one look-up: the hash of an operator runs Python.

    Args:
        draws: Whether it draws from a random generator.
        may_read: Whether it may read values on the host.
        writes: Whether it writes into operands.
        sets_storage: Whether it gives a tensor another storage.
        is_alias: Whether its result is its operand.
    """

    draws: bool
    may_read: bool
    writes: bool
    sets_storage: bool
    is_alias: bool


@cache
def _kind_of(operator: Any) -> _Kind:
    return _Kind(
        draws=torch_private.draws(operator),
        may_read=torch_private.may_read_values(operator),
        writes=torch_private.writes_first(operator) or torch_private.writes_others(operator),
        sets_storage=operator in _SETS_STORAGE,
        is_alias=operator in _ALIASES or torch_private.is_wait(operator),
    )


# Set while this thread records a step: gradient hooks, which autograd calls, ask for it.
_recording: ContextVar[Recorder | None] = ContextVar("recording", default=None)


def recording() -> Recorder | None:
    """Looks up the recorder of the step that this thread records, None without one."""
    return _recording.get()


def _host_generator_states() -> Any:
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"]


_COMPUTE = "compute with keras.ops, which keeps values in tensors"
_DRAW = "draw by keras.random, with a SeedGenerator of the layer"
