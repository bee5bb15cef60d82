"""Generates a Python function from a trace, one line per call (ADR 24), or a torch.fx graph."""

import hashlib
import linecache
import logging
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import fx

from shardcore.adapters import torch_private
from shardcore.adapters.capture.trace import Call, Literals, Number, Trace, Value, numbered, values
from shardcore.adapters.ranks.waiting import raise_if_late
from shardcore.adapters.source_line import SourceLine
from shardcore.domain.capture import GuardFailed
from shardcore.reporting.errors import CAPTURED
from shardcore.reporting.logs import log_of

logger = log_of("capture")


def function_of(trace: Trace, literals: Literals) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Generates a Python function that makes the calls of `trace`, and returns its outputs.

    It takes the inputs, then the tensors from outside that are no literals. It drops each value
    after the last call that reads it. The error of an operator gets a note with the recorded line.
    """
    writer = _Writer(trace, literals, torch_private.direct)
    generated = writer.function()
    recorded = list(_source_lines(trace))

    def run(*operands: Any) -> tuple[torch.Tensor, ...]:
        try:
            made: tuple[torch.Tensor, ...] = generated(*operands)
        except GuardFailed:
            raise
        except Exception as error:
            frame = error.__traceback__ and error.__traceback__.tb_next
            index = frame.tb_lineno - writer.lines_before - 1 if frame else -1
            if not 0 <= index < len(recorded):
                raise
            collective, line = recorded[index]
            raise_if_late(error, f"{collective} of a captured step ({line})")
            error.add_note(f"In a captured step, where eagerly it is {line}")
            raise
        return made

    return run


def _source_lines(trace: Trace) -> Iterator[tuple[str, SourceLine | str]]:
    """Yields the collective and the recorded line of each call; of a wait, those of its start."""
    started: dict[Value, Call] = {}
    for call in trace.calls:
        source = started.get(call.operands[0], call) if call.is_wait else call
        yield source.collective, source.line
        if call.collective:
            started |= dict.fromkeys(call.results, call)


def graph_of(trace: Trace, literals: Literals) -> fx.GraphModule:
    """Builds the same function as a graph of torch.fx: its lines add nodes in place of calls.

    The literals become buffers of the module.
    """
    root, tracer = torch.nn.Module(), fx.proxy.GraphAppendingTracer(fx.Graph())

    def node(operator: Any) -> Callable[..., fx.Proxy]:
        return lambda *args, **named: tracer.create_proxy("call_function", operator, args, named)

    writer = _Writer(trace, literals, node)
    operands = [tracer.create_proxy("placeholder", _name(value), (), {}) for value in writer.given]
    generated = writer.function()
    for name, tensor in writer.tensors.items():
        root.register_buffer(name, tensor)
        writer.names[name] = tracer.create_proxy("get_attr", name, (), {})
    tracer.graph.output(tuple(proxy.node for proxy in generated(*operands)))
    return fx.GraphModule(root, tracer.graph)


@attrs.define(eq=False)
class _Writer:
    """Writes the function.

    Args:
        trace: A step.
        literals: Its constants.
        bound: Returns the callable for an operator.
        names: The globals of the function: operators, plain constants and tensors.
        tensors: Constants and buffers of the program, by name.
        lines_before: The number of lines before the calls.
    """

    trace: Trace
    literals: Literals
    bound: Callable[[Any], Callable[..., Any]]
    names: dict[str, Any] = attrs.field(factory=dict, init=False)
    tensors: dict[str, torch.Tensor] = attrs.field(factory=dict, init=False)
    lines_before: int = attrs.field(default=0, init=False)
    _constants: dict[Any, str] = attrs.field(factory=dict, init=False)

    @property
    def given(self) -> list[Value]:
        outside = (numbered(n) for n in self.trace.outside if n not in self.literals)
        return [*self.trace.inputs, *outside]

    def function(self) -> Callable[..., tuple[Any, ...]]:
        """Compiles the lines; the globals of the function are `names`."""
        head = self._head()
        self.lines_before = len(head)
        calls = zip(self.trace.calls, self._ended(), strict=True)
        lines = [*head, *(self._line(call, ended) for call, ended in calls), self._end()]
        self.tensors |= {f"v{number}": tensor for number, tensor in self.trace.buffers.items()}
        self.names |= self.tensors
        text = "\n    ".join(lines) + "\n"
        file = f"{CAPTURED}{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
        # Of `exec`'d code, tracebacks and debuggers ask the loader for the lines (by `linecache`).
        sources = [source for _, source in _source_lines(self.trace)]
        self.names |= {"__name__": "generated", "__loader__": _Source(lines, len(head), sources)}
        if logger.isEnabledFor(logging.DEBUG):
            linecache.lazycache(file, self.names)
            logger.debug("%d calls run as linecache.getlines(%r)", len(self.trace.calls), file)
        exec(compile(text, file, "exec"), self.names)
        # It keeps its globals: with itself among them, it would keep itself.
        generated: Callable[..., tuple[Any, ...]] = self.names.pop("generated")
        return generated

    def _head(self) -> list[str]:
        """Writes the lines before the calls: they copy each constant that a run writes into."""
        written = self.trace.overwritten()
        lines = [f"def generated({', '.join(map(_name, self.given))}):"]
        for number, tensor in self.literals.items():
            is_written = self.trace.memory[number] in written
            name = f"literal{number}" if is_written else f"v{number}"
            self.tensors[name] = tensor.detach().clone()
            lines += [f"v{number} = {name}.clone()"] if is_written else []
        return lines

    def _end(self) -> str:
        leaves = torch_private.tree_leaves(self.trace.outputs)
        return (
            f"return ({''.join(f'{_name(leaf)}, ' for leaf in leaves if isinstance(leaf, Value))})"
        )

    def _ended(self) -> list[list[Value]]:
        """Lists, by call, the values that are dropped after it."""
        there = map(numbered, (*self.trace.buffers, *self.literals))
        read = {*values(self.trace.outputs), *self.given, *there}
        ended: list[list[Value]] = []
        for call in reversed(self.trace.calls):
            used = dict.fromkeys((*call.operands, *call.results))
            ended.append([value for value in used if value not in read])
            read.update(used)
        return ended[::-1]

    def _line(self, call: Call, ended: list[Value]) -> str:
        operands = [self._operand(arg) for arg in call.args]
        operands += [f"{name}={self._operand(arg)}" for name, arg in call.kwargs.items()]
        stem = re.sub(r"\W+", "_", call.name.removesuffix(".default"))
        line = f"{self._constant(call.operator, self.bound, f'{stem}_')}({', '.join(operands)})"
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

    def _constant(
        self, thing: Any, bound: Callable[[Any], Any] | None = None, stem: str = "c"
    ) -> str:
        if _is_literal(thing):
            return repr(thing)
        key = thing if callable(thing) else (repr(thing), type(thing))
        name = self._constants.setdefault(key, f"{stem}{len(self._constants)}")
        if name not in self.names:
            self.names[name] = thing if bound is None else bound(thing)
        return name


@attrs.frozen
class _Source:
    """The loader of the generated function: it has the text, with the source line of each call.

    Args:
        lines: The lines of the function.
        lines_before: The number of lines before the calls.
        sources: The source line of each call.
    """

    lines: list[str]
    lines_before: int
    sources: list[SourceLine | str]

    def get_source(self, name: str) -> str:
        """Writes the text; `linecache` calls it."""
        lines = list(self.lines)
        for index, source in enumerate(self.sources, self.lines_before):
            lines[index] += f"  # {_comment(str(source))}"
        return "\n    ".join(lines) + "\n"


def _is_literal(thing: object) -> bool:
    """Tells whether Python reads `repr(thing)` as an equal constant, of the same type."""
    if type(thing) is tuple:
        return all(map(_is_literal, thing))
    if type(thing) is float:
        return math.isfinite(thing)
    return type(thing) in (bool, int, str, type(None))


def _comment(line: str) -> str:
    """Joins lines: the name of a file may have any characters."""
    return " ".join(line.split())


def _name(value: Value) -> str:
    return f"v{value.number}"


def _target(result: Any, made: set[Value]) -> str:
    """Writes the target of the assignment: the names of new values, in brackets if a list."""
    if isinstance(result, list | tuple):
        return f"[{', '.join(_target(nested, made) for nested in result)}]"
    return _name(result) if result in made else "_"
