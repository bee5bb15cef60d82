"""Chooses what runs a captured step: its generated function, Inductor's code, a CUDA graph."""

from collections.abc import Sequence, Set
from types import FunctionType
from typing import Any

import attrs

from shardcore.adapters import torch_private
from shardcore.adapters.capture.running import compilation, cuda_graphs
from shardcore.adapters.capture.running.cuda_graphs import Function
from shardcore.adapters.capture.running.generated import function_of
from shardcore.adapters.capture.trace.analyses import needs_of, with_needs
from shardcore.adapters.capture.trace.trace import Call, Literals, Trace, numbered, values
from shardcore.domain.errors import OtherRankFailed
from shardcore.domain.steps.capture import NotCaptured


@attrs.frozen
class Executor:
    """The function that runs a captured step.

    Args:
        run: Takes the inputs, then the tensors and generators from outside.
        remark: The reason why it is not compiled if it should be.
        is_replayed: Whether it replays a CUDA graph.
    """

    run: Function
    remark: str = ""
    is_replayed: bool = False


@attrs.frozen
class Executors:
    """Makes the functions of traces, and keeps what they share.

    Args:
        onednn: Operators for compiled steps.
        pool: The memory of CUDA graphs.
    """

    onednn: torch_private.OneDnn = attrs.field(factory=torch_private.OneDnn)
    pool: cuda_graphs.Pool = attrs.field(factory=cuda_graphs.Pool)

    def close(self) -> None:
        """Removes our operators from torch, and drops all graphs."""
        self.onednn.close()
        self.pool.close()

    def executor(
        self, trace: Trace, captured_inputs: Sequence[Any], literals: Literals, *, compiled: bool
    ) -> Executor:
        """Returns the executor of `trace`; `captured_inputs` are its tensors from outside."""
        on_gpu = cuda_graphs.is_on_gpu(trace, literals)
        if not compiled and not on_gpu:
            return Executor(function_of(trace, literals))
        try:
            ahead, rest = divide(trace, set(literals))
        except NotCaptured as error:
            return Executor(function_of(trace, literals), str(error) if compiled else "")
        second, remark = self._compiled(rest, captured_inputs, literals) if compiled else (None, "")
        graph = cuda_graphs.replayable(ahead, rest, literals) if on_gpu else None
        if graph is not None:
            run = second or function_of(graph, literals)
            joins = any(call.collective for call in graph.calls)
            second = cuda_graphs.Replayed(run, len(rest.inputs), self.pool, joins)
        if second is None:
            return Executor(function_of(trace, literals), remark)
        run = _both(function_of(ahead, literals), second, len(trace.inputs))
        return Executor(run, remark, is_replayed=graph is not None)

    def _compiled(
        self, trace: Trace, captured_inputs: Sequence[Any], literals: Literals
    ) -> tuple[Function | None, str]:
        """Returns the compiled function of `trace`; None and the reason if Inductor fails."""
        try:
            return compilation.compile_trace(trace, captured_inputs, literals, self.onednn), ""
        except OtherRankFailed:  # this rank ends
            raise
        except Exception as error:  # noqa: BLE001 - whatever it raises, the step runs without
            return None, f"{type(error).__name__}: {error}"


def _both(first: Function, second: Function, count: int) -> Function:
    """Returns the function of both parts of a step; the second takes the results of the first."""

    def run(*operands: Any) -> tuple[Any, ...]:
        return second(*operands[:count], *first(*operands), *operands[count:])

    return run


def divide(trace: Trace, literals: Set[int]) -> tuple[Trace, Trace]:
    """Returns `trace` in two: the calls that only Python runs, with their dependencies; the rest.

    Those are functions of Python, calls with random generators or in another mode, and copies from
    the host to a device, which no CUDA graph takes. Draws depend on shapes and seeds, as a rule, so
    the first part is small. Its outputs are the last inputs of the second part.

    Raises:
        NotCaptured: If both parts would write into views of one memory.
    """
    calls = enumerate(trace.calls)
    indices = with_needs((n for n, call in calls if _is_for_python(trace, call)), needs_of(trace))
    ahead = trace.with_calls(call for n, call in enumerate(trace.calls) if n in indices)
    rest = trace.with_calls(call for n, call in enumerate(trace.calls) if n not in indices)
    made = {value for call in ahead.calls for value in call.results}
    used = {value for call in rest.calls for value in call.operands} | set(values(trace.outputs))
    known = {*trace.inputs, *(numbered(n) for n in trace.outside if n not in literals)}
    given = sorted((made & used) - known, key=lambda value: value.number)
    if trace.memories(given) & trace.given():
        raise NotCaptured("a random draw and another call read one view of a tensor from outside")
    ahead.outputs, rest.inputs = tuple(given), [*trace.inputs, *given]
    return ahead, rest


def _is_for_python(trace: Trace, call: Call) -> bool:
    forms = [trace.forms[value.number] for value in (*call.operands, *call.results)]
    if None in forms or isinstance(call.operator, FunctionType):  # no form: a generator
        return True
    if torch_private.needs_grad_mode(call.operator):
        return True
    is_copy = call.operator is torch_private.TO_COPY
    return is_copy and len({form.device for form in forms if form is not None}) > 1
