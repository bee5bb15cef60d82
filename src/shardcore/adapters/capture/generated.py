"""A tape as one generated function of Python: a line for each call."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.constants import written_memories
from shardcore.adapters.capture.tape import Call, Number, Tape, Value, values
from shardcore.domain.capture import GuardFailed


def function_of(
    tape: Tape, literals: Mapping[int, torch.Tensor]
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The function that makes the calls of `tape`, and returns its outputs.

    It takes the inputs, and then what is outside and no literal. It drops each value after the last
    call that reads it. An operator that fails gets a note with the line that was recorded.

    Args:
        tape: What a step did.
        literals: By number, the constants among what is outside.
    """
    writer = _Writer(tape, literals)
    before, calls = [writer.head(), *writer.copies()], writer.lines()
    source = "\n    ".join([*before, *calls, writer.end()])
    exec(compile(source, "<captured step>", "exec"), writer.names)
    generated = writer.names.pop("generated")  # which keeps them: it would keep itself
    recorded = [call.line for call in tape.calls]

    def run(*operands: Any) -> tuple[torch.Tensor, ...]:
        try:
            made: tuple[torch.Tensor, ...] = generated(*operands)
        except GuardFailed:
            raise
        except Exception as error:
            frame = error.__traceback__ and error.__traceback__.tb_next
            place = frame.tb_lineno - len(before) - 1 if frame else -1
            if 0 <= place < len(recorded):
                error.add_note(f"In a captured step, where eagerly it is {recorded[place]}")
            raise
        return made

    return run


class _Writer:
    """Writes the lines of the function.

    Attributes:
        names: The objects that the function knows by name: operators, constants, kept tensors.
    """

    def __init__(self, tape: Tape, literals: Mapping[int, torch.Tensor]) -> None:
        self._tape, self._literals = tape, literals
        self._given = [*tape.inputs, *(Value(n) for n in tape.outside if n not in literals)]
        self._constants: dict[Any, str] = {}
        self.names: dict[str, Any] = {f"v{n}": tensor for n, tensor in tape.kept.items()}

    def head(self) -> str:
        """The line that names the operands."""
        return f"def generated({', '.join(map(_name, self._given))}):"

    def copies(self) -> Iterator[str]:
        """The lines that copy a constant into which a run writes."""
        written = written_memories(self._tape)
        for number, tensor in self._literals.items():
            literal = tensor.detach().clone()
            if self._tape.memory[number] in written:
                self.names[f"literal{number}"] = literal
                yield f"v{number} = literal{number}.clone()"
            else:
                self.names[f"v{number}"] = literal

    def lines(self) -> list[str]:
        """A line for each call."""
        return [
            self._line(call, ended)
            for call, ended in zip(self._tape.calls, self._ended(), strict=True)
        ]

    def end(self) -> str:
        """The line that returns the outputs."""
        leaves = torch_compat.tree_leaves(self._tape.outputs)
        return f"return ({''.join(f'{_name(each)}, ' for each in leaves if _is_value(each))})"

    def _ended(self) -> list[list[Value]]:
        """By call, the values that are dropped after it."""
        there = map(Value, (*self._tape.kept, *self._literals))
        read = {*values(self._tape.outputs), *self._given, *there}
        found: list[list[Value]] = []
        for call in reversed(self._tape.calls):
            used = dict.fromkeys((*call.operands, *call.results))
            found.append([value for value in used if value not in read])
            read |= used.keys()
        return found[::-1]

    def _line(self, call: Call, ended: list[Value]) -> str:
        operands = [self._operand(each) for each in call.args]
        operands += [f"{name}={self._operand(each)}" for name, each in call.kwargs.items()]
        line = f"{self._constant(torch_compat.direct(call.operator))}({', '.join(operands)})"
        made = set(call.results) - set(call.operands)
        if made:
            line = f"{_target(call.result, made)} = {line}"
        return f"{line}; del {', '.join(map(_name, ended))}" if ended else line

    def _operand(self, nest: Any) -> str:
        if isinstance(nest, Value):
            return _name(nest)
        if isinstance(nest, Number):
            return f"{_name(nest.value)}.item()"
        if values(nest):
            return f"[{', '.join(map(self._operand, nest))}]"
        return self._constant(nest)

    def _constant(self, thing: Any) -> str:
        key = thing if callable(thing) else (repr(thing), type(thing))
        name = self._constants.setdefault(key, f"c{len(self._constants)}")
        self.names[name] = thing
        return name


def _name(value: Value) -> str:
    return f"v{value.number}"


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)


def _target(result: Any, made: set[Value]) -> str:
    """What is assigned to: names of what is made, in brackets where it is a list."""
    if isinstance(result, list | tuple):
        return f"[{', '.join(_target(each, made) for each in result)}]"
    return _name(result) if result in made else "_"
