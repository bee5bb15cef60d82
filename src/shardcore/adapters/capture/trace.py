"""The trace of a step: its operators on plain tensors, in the order in which they ran."""

import math
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.source_line import SourceLine
from shardcore.domain.layouts.memory_order import contiguous_strides
from shardcore.ports.capture import RecordedSum, RecordedSums


@attrs.frozen(eq=False, repr=False)
class Value:
    """A tensor, or a random generator, of a trace; `numbered` returns the one with a number.

    There is one object for each number: passes compare values and look them up a million times.
    The number is its position in the order in which the recorder has seen the values.
    """

    number: int

    def __repr__(self) -> str:
        return f"v{self.number}"


@cache
def numbered(number: int) -> Value:
    """Looks up the one value with this number."""
    return Value(number)


@attrs.frozen(repr=False)
class Number:
    """The number in a tensor of a trace, as an operand: Keras passes a learning rate so."""

    value: Value

    def __repr__(self) -> str:
        return f"{self.value}.item()"


@attrs.frozen
class Form:
    """The metadata of a plain tensor; `adapters.engine.tensor.Form` is that of a sharded one.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        device: Its device.
        strides: Its strides, by default those of a contiguous tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...] = attrs.Factory(
        lambda form: contiguous_strides(form.shape), takes_self=True
    )

    @classmethod
    def of(cls, thing: Any) -> "Form | None":
        """Reads the form of a tensor; None for a generator."""
        if not isinstance(thing, torch.Tensor):
            return None
        return cls(tuple(thing.shape), thing.dtype, thing.device, thing.stride())

    @property
    def is_dense(self) -> bool:
        """Whether it is contiguous."""
        return self.strides == contiguous_strides(self.shape)

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of its elements."""
        return self.elements * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


# By number, the constants among the tensors from outside of a trace.
Literals = Mapping[int, torch.Tensor]


@attrs.frozen
class Call:
    """One operator that ran.

    Args:
        operator: The operator or function.
        args: Its operands, tensors as `Value`.
        kwargs: Its named operands.
        result: Its result, tensors as `Value`. A tensor that it writes in place keeps its value.
        writes: The values whose memory it writes into.
        line: The line of Python that led to it, for messages.
        backward: Whether it ran in a backward pass.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    writes: tuple[Value, ...] = ()
    line: SourceLine | str = attrs.field(default="", eq=False)
    backward: bool = attrs.field(default=False, eq=False)

    @cached_property
    def operands(self) -> tuple[Value, ...]:
        """The values that it reads."""
        return values((self.args, self.kwargs))

    @cached_property
    def results(self) -> tuple[Value, ...]:
        """The values among its results."""
        return values(self.result)

    @cached_property
    def collective(self) -> str:
        """The name of the collective that it starts; empty without one."""
        return torch_private.collective_name(self.operator)

    @cached_property
    def is_all_reduce(self) -> bool:
        """Whether it starts an all-reduce that is not in place."""
        return torch_private.is_all_reduce(self.operator)

    @cached_property
    def is_wait(self) -> bool:
        """Whether it waits for a collective."""
        return torch_private.is_wait(self.operator)

    @cached_property
    def draws(self) -> bool:
        """Whether it draws from a random generator."""
        return torch_private.draws(self.operator)

    @property
    def name(self) -> str:
        """The name of the operator: `aten.mm.default`."""
        text = str(self.operator)
        return self.operator.__name__ if text.startswith("<") else text

    def __str__(self) -> str:
        operands = [*map(repr, self.args), *(f"{key}={arg}" for key, arg in self.kwargs.items())]
        return f"{self.result} = {self.name}({', '.join(operands)})"


@attrs.frozen
class Read:
    """A value that was read on the host.

    Args:
        value: The tensor.
        number: Its number; None if more than one was read.
        index: The index in `calls` of the next call.
        line: The reader and its line of Python, for messages.
    """

    value: Value
    number: Any
    index: int
    line: str


@attrs.define
class Trace:
    """The operators of one run of a step, on plain tensors.

    Args:
        calls: The operators, in order.
        inputs: The values of the batch, in order.
        outside: By number, the tensors and generators that no recorded call made: variables,
            constants.
        first_values: By number, copies of the small tensors in `outside` at their first use.
        reads: The values that were read on the host.
        memory: By number, the number of the value that owns the memory. Views share one.
        forms: By number, the form of a value; None for a generator.
        reshapes: Whether a tensor gets another shape, or other strides, in place: `forms` has the
            first.
        draws_on_host: Whether Python or NumPy drew random numbers.
        buffers: By number, tensors of the program: constants that a pass has computed, and scratch
            memory, into which each run writes before it reads.
        outputs: The result of the step, tensors as `Value`.
        refusal: The reason why no program can be made of it; else empty.
        donated: The number of the first inputs that the first outputs replace, of which a run may
            overwrite the memory.
    """

    calls: list[Call] = attrs.field(factory=list)
    inputs: list[Value] = attrs.field(factory=list)
    outside: dict[int, Any] = attrs.field(factory=dict)
    first_values: dict[int, torch.Tensor] = attrs.field(factory=dict)
    reads: list[Read] = attrs.field(factory=list)
    memory: list[int] = attrs.field(factory=list)
    forms: list[Form | None] = attrs.field(factory=list)
    reshapes: bool = False
    draws_on_host: bool = False
    buffers: dict[int, torch.Tensor] = attrs.field(factory=dict)
    outputs: Any = None
    refusal: str = ""
    donated: int = 0

    def __str__(self) -> str:
        """Writes a line for each call: its operands, the forms of its results, its source line."""
        lines = [f"inputs {self.inputs}, from outside {[*map(numbered, self.outside)]}"]
        for call in self.calls:
            forms = ", ".join(str(self.forms[value.number]) for value in call.results)
            lines.append(f"{call}  # {forms}; {call.line}")
        return "\n".join(lines)

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The numbers that the step read on the host."""
        return tuple(read.number for read in self.reads)

    @property
    def last_read(self) -> str:
        """The operator that read the last of them, and its line of Python."""
        return self.reads[-1].line if self.reads else ""

    @property
    def all_reduces(self) -> RecordedSums:
        """The all-reduces, in order."""
        indices = [index for index, call in enumerate(self.calls) if call.is_all_reduce]
        return tuple(RecordedSum(self.form(self.calls[at].args[0]).bytes, at) for at in indices)

    def new(self, form: Form, memory: int | None = None) -> Value:
        """Adds a value for a call that a pass adds; its memory is new, or that of `memory`."""
        value = numbered(len(self.memory))
        self.memory.append(value.number if memory is None else memory)
        self.forms.append(form)
        return value

    def form(self, value: Value) -> Form:
        """Looks up the form of a tensor; a generator has none."""
        form = self.forms[value.number]
        assert form is not None, f"{value} is a generator"
        return form

    def memories(self, values: Iterable[Value]) -> set[int]:
        """Looks up the numbers of the values that own the memory: views share one."""
        return {self.memory[value.number] for value in values}

    def reads_of(self, call: Call) -> set[int]:
        """Lists the memories of the operands of `call`."""
        return self.memories(call.operands)

    def writes_of(self, call: Call) -> set[int]:
        """Lists the memories that `call` writes into, those of its results among them."""
        return self.memories((*call.results, *call.writes))

    def overwritten(self) -> set[int]:
        """Lists the memories that calls write into in place."""
        return self.memories(value for call in self.calls for value in call.writes)

    def given(self) -> set[int]:
        """Lists the memories of the batch and of the tensors from outside."""
        return self.memories((*self.inputs, *map(numbered, self.outside)))

    def with_calls(self, calls: Iterable[Call]) -> "Trace":
        """Copies the step with other calls, to which a pass may add values."""
        return attrs.evolve(
            self, calls=list(calls), memory=list(self.memory), forms=list(self.forms)
        )

    def share(self, names: Mapping[Value, Value]) -> None:
        """Moves each value, and all that shares its memory, into the memory of the other one."""
        owners: dict[int, int] = {}

        def owner(memory: int) -> int:
            while memory in owners:
                memory = owners[memory]
            return memory

        for value, other in names.items():
            own, others = owner(self.memory[value.number]), owner(self.memory[other.number])
            if own != others:
                owners[own] = others
        self.memory[:] = map(owner, self.memory)


def values(nest: Any) -> tuple[Value, ...]:
    """Lists the values in `nest`, those of its numbers among them."""
    leaves = torch_private.tree_leaves(nest)
    operands = [leaf for leaf in leaves if isinstance(leaf, Value | Number)]
    return tuple([leaf.value if isinstance(leaf, Number) else leaf for leaf in operands])
