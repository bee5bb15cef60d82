"""Chooses what runs a captured step: a generated function, Inductor's code or a CUDA graph."""

import time
from collections.abc import Callable, Sequence, Set
from types import FunctionType
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.analyses import needs_of, with_needs
from shardcore.adapters.capture.passes import run_passes_for_compiler
from shardcore.adapters.capture.running import cuda_graphs
from shardcore.adapters.capture.running.cuda_graphs import Function
from shardcore.adapters.capture.running.generated import function_of, graph_of
from shardcore.adapters.capture.trace import Call, Literals, Trace, numbered, values
from shardcore.adapters.ranks.waiting import raise_if_late
from shardcore.domain.capture import NotCaptured
from shardcore.domain.errors import OtherRankFailed, describe_error
from shardcore.reporting.logs import log_of

logger = log_of("capture")

# The lines of collectives that an error names at most.
_MOST_LINES = 4


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
        """Chooses the executor of `trace`; `captured_inputs` are its tensors from outside."""
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
        """Compiles `trace`; None and the reason if Inductor fails."""
        try:
            return compile_trace(trace, captured_inputs, literals, self.onednn), ""
        except OtherRankFailed:  # this rank ends
            raise
        except Exception as error:  # noqa: BLE001 - whatever it raises, the step runs without
            return None, describe_error(error)


def _both(first: Function, second: Function, count: int) -> Function:
    """Joins both parts of a step; the second takes the results of the first."""

    def run(*operands: Any) -> tuple[Any, ...]:
        return second(*operands[:count], *first(*operands), *operands[count:])

    return run


def divide(trace: Trace, literals: Set[int]) -> tuple[Trace, Trace]:
    """Divides `trace`: the calls that only Python runs, with their dependencies; and the rest.

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


def compile_trace(
    trace: Trace, captured_inputs: Sequence[Any], literals: Literals, onednn: torch_private.OneDnn
) -> Callable[..., Any]:
    """Compiles `trace`, the second part of a step, by Inductor.

    `captured_inputs` are the tensors from outside that the step reads. It raises whatever Inductor
    raises.
    """
    size = len(trace.calls)
    logger.info("Inductor compiles a step of %d operators, unless torch has it on disk", size)
    began = time.perf_counter()
    forms = [trace.form(value) for value in trace.inputs]
    inputs = [torch.empty(form.shape, dtype=form.dtype, device=form.device) for form in forms]
    module = graph_of(run_passes_for_compiler(trace, onednn), literals)
    try:
        generated = torch_private.inductor.compile_graph(
            module, [*inputs, *map(_detached, captured_inputs)]
        )
    finally:
        logger.info("Inductor has ended after %.1f s", time.perf_counter() - began)
    count, started = len(trace.inputs), _collectives(trace)

    def run(*operands: Any) -> Any:
        ready = map(torch.Tensor.contiguous, map(_detached, operands[:count]))
        try:
            return generated(*ready, *map(_detached, operands[count:]))
        except RuntimeError as error:
            raise_if_late(error, f"a collective of a compiled step ({started})")
            raise

    return run


def _collectives(trace: Trace) -> str:
    """Names the collectives of `trace` and their recorded lines, of which one has failed.

    Inductor may reorder them, so it is not known which of them an error is of.
    """
    texts = [f"{call.collective}, {call.line}" for call in trace.calls if call.collective]
    lines = list(dict.fromkeys(texts))
    more = f"; or one of {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    return "; or ".join(lines[:_MOST_LINES]) + more


# A parameter would need a graph for autograd. No Python function runs for each variable.
_detached = torch.Tensor.detach
