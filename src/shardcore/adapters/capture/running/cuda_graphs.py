"""Replays captured steps as CUDA graphs: one launch for a step, not for each operator (ADR 48).

Not every step: `reason_against` returns why one keeps its launches. What Python has to run comes
before the graph. A step that starts collectives has one only if the user asks for it: NCCL wants
that all ranks record together, so one that cannot ends with an error.
"""

import atexit
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import attrs
import torch

from shardcore.adapters import switches, torch_private
from shardcore.adapters.capture.passes.inductor import with_factors_apart
from shardcore.adapters.capture.running.replay_watch import ReplayWatch
from shardcore.adapters.capture.trace import (
    Call,
    Form,
    Literals,
    Number,
    Trace,
    Value,
    numbered,
    values,
)
from shardcore.adapters.torch_private import unnamed_operators
from shardcore.domain.errors import EnvironmentProblem
from shardcore.reporting.logs import log_of

logger = log_of("capture")

VARIABLE = "SHARDCORE_CUDA_GRAPHS"
WITH_COLLECTIVES = "nccl"
_VALUES = ("1", "0", WITH_COLLECTIVES)
_INSTEAD = f"Unset {VARIABLE}, so that steps with collectives run without graphs."

# A graph keeps the memory that its step needs: at most that of its inputs and all results.
_MOST_OF_FREE_MEMORY = 0.25
# The states of the random generator, which attention returns on the host, and its backward pass
# passes on: torch handles them in a graph.
_ATTENTION = {
    unnamed_operators.FLASH_ATTENTION,
    unnamed_operators.EFFICIENT_ATTENTION,
    unnamed_operators.CUDNN_ATTENTION,
}
_READ_ON_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

_GPU = torch.device("cuda")
Function = Callable[..., tuple[torch.Tensor, ...]]


@attrs.define(eq=False)
class Pool:
    """The memory of graphs, which share it: no output of a graph is read after the next replay."""

    failures: int = attrs.field(default=0, init=False)
    watch: ReplayWatch = attrs.field(factory=ReplayWatch, init=False)
    _handle: Any = attrs.field(default=None, init=False)
    _graphs: WeakSet[Any] = attrs.field(factory=WeakSet, init=False)  # of the present handle
    _all: WeakSet[Any] = attrs.field(factory=WeakSet, init=False)

    def handle(self) -> Any:
        """Makes a new handle while there is no graph: torch takes no old one then."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def add(self, graph: Any) -> None:
        """Notes a graph that has its memory here."""
        if not self._all:
            atexit.register(self.close)
        self._graphs.add(graph)
        self._all.add(graph)

    def close(self) -> None:
        """Drops all graphs, none of which is replayed any more: NCCL waits for them at its end."""
        atexit.unregister(self.close)
        self.watch.stop()
        for graph in self._all:
            graph.reset()
        self._all.clear()
        self._graphs.clear()

    def recover(self) -> None:
        """Has later graphs take other memory, and another state of the random generator.

        torch 2.11 leaves both in the state of recording if a recording fails: the next draw would
        be an error. Earlier graphs read the old state, so they are recorded again.
        """
        self.failures += 1
        self._graphs.clear()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())


@attrs.define(eq=False)
class Replayed:
    """The function of a step that records a graph at its second run, and replays it from then on.

    The first run loads kernels: Triton compiles its own at their first launch. The outputs of a
    replay are overwritten by the next one.

    Args:
        run: The function: takes the inputs and the captured inputs.
        inputs: The number of inputs, which are other tensors in each run.
        pool: The memory of all graphs.
        has_collectives: Whether the function starts collectives.
    """

    run: Function
    inputs: int
    pool: Pool
    has_collectives: bool = False
    _runs: int = attrs.field(default=0, init=False)
    _graph: Any = attrs.field(default=None, init=False)
    _copies: list[torch.Tensor] = attrs.field(factory=list, init=False)
    _addresses: list[int] = attrs.field(factory=list, init=False)
    _outputs: tuple[torch.Tensor, ...] = attrs.field(default=(), init=False)
    _failed: bool = attrs.field(default=False, init=False)
    _failures: int = attrs.field(default=0, init=False)  # those of the pool when it was recorded

    def __call__(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Replays the step, runs it, or records it.

        Raises:
            EnvironmentProblem: If one rank alone would record a graph with collectives, or run
                the step without it.
        """
        self._runs += 1
        # Generators, which are operands too, are for the part that runs before.
        addresses = [
            operand.data_ptr() for operand in operands[self.inputs :] if torch.is_tensor(operand)
        ]
        is_recorded = (addresses, self.pool.failures) == (self._addresses, self._failures)
        if self._runs > 1 and not self._failed and (self._graph is None or not is_recorded):
            if self.has_collectives and self._graph is not None:
                raise EnvironmentProblem(
                    _message_of_recording_alone(has_moved=addresses != self._addresses)
                )
            self._addresses, self._failures = addresses, self.pool.failures
            self._record(operands)
        if self._graph is None:
            return self.run(*operands)
        for copy, given in zip(self._copies, operands[: self.inputs], strict=True):
            copy.copy_(given)
        self._graph.replay()
        if self.has_collectives:
            self.pool.watch.add()
        return self._outputs

    def _record(self, operands: Sequence[torch.Tensor]) -> None:
        """Records the graph; nothing is computed yet."""
        began = time.perf_counter()
        self._graph = None
        graph = torch.cuda.CUDAGraph()
        try:
            # Else torch's random generator gets inference tensors, which no other graph can write.
            with torch.inference_mode(False), torch.no_grad():
                self._copies = [operand.clone() for operand in operands[: self.inputs]]
                # Other threads may allocate memory meanwhile.
                with torch.cuda.graph(
                    graph, pool=self.pool.handle(), capture_error_mode="thread_local"
                ):
                    self._outputs = self.run(*self._copies, *operands[self.inputs :])
        except RuntimeError as error:
            self._failed, self._outputs = True, ()
            self.pool.recover()
            if self.has_collectives:
                raise EnvironmentProblem(
                    "Expected this rank to record a CUDA graph with collectives, as the others do, "
                    f"but torch says: {error}. {_INSTEAD}"
                ) from error
            logger.warning("A captured step runs without a CUDA graph, as torch says: %s", error)
            return
        self._graph = graph
        self.pool.add(graph)
        seconds = time.perf_counter() - began
        logger.debug("A captured step is replayed as a CUDA graph, recorded in %.2f s", seconds)


def _message_of_recording_alone(*, has_moved: bool) -> str:
    why = (
        "a variable has moved to other memory. Assign to a variable in place (variable.assign)."
        if has_moved
        else "another step could not be recorded, after which all graphs are recorded again."
    )
    return (
        "Expected this rank to keep its CUDA graph with collectives, which all ranks record "
        f"together, but {why} {_INSTEAD}"
    )


def is_on_gpu(trace: Trace, literals: Literals) -> bool:
    """Looks at the inputs and the tensors from outside, not at constants."""
    outside = (numbered(number) for number in trace.outside if number not in literals)
    return any(_device(trace, value) == "cuda" for value in (*trace.inputs, *outside))


def replayable(ahead: Trace, rest: Trace, literals: Literals) -> Trace | None:
    """Rewrites `rest` for a graph; None if no graph can replay it, which is logged.

    Args:
        ahead: The part of a step on a GPU that Python runs before.
        rest: The part that takes its results.
        literals: The constants of the step.
    """
    separated = with_factors_apart(rest)
    reason = f"{VARIABLE}=0" if wanted() == "0" else ""
    if len(ahead.calls) > len(rest.calls):
        reason = reason or f"Python runs most of it, to {ahead.calls[-1].line}"
    if reason := reason or reason_against(separated, literals, _free_bytes()):
        logger.debug("A captured step is not replayed as a CUDA graph: %s", reason)
    return None if reason else separated


def _device(trace: Trace, value: Value) -> str:
    form = trace.forms[value.number]
    return "" if form is None else form.device.type


def _free_bytes() -> int:
    """Counts the bytes of the GPU that no tensor holds, those that torch has reserved too."""
    free, _ = torch.cuda.mem_get_info()
    return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


def reason_against(trace: Trace, literals: Literals, free_bytes: int) -> str:
    """Explains why no graph can replay a step with so much free memory; empty if one can."""
    if trace.donated:
        return "it overwrites its inputs"
    if trace.reshapes:
        return "a tensor gets another shape in place"
    used = {value for call in trace.calls for value in call.operands} | set(values(trace.outputs))
    given = [
        *trace.inputs,
        *(numbered(number) for number in trace.outside if number not in literals),
    ]
    if any(_device(trace, value) != "cuda" for value in given if value in used):
        return "it reads a tensor of the host"
    if not all(_is_compact(trace.form(value)) for value in trace.inputs):
        return "a tensor of its batch has gaps"
    takes_collectives = wanted() == WITH_COLLECTIVES
    for call in trace.calls:
        if reason := _reason_against_call(call, trace, takes_collectives=takes_collectives):
            return reason
    needed = sum(trace.form(value).bytes for value in trace.inputs)
    needed += sum(size for call in trace.calls for size in _bytes(call, trace))
    if needed > free_bytes * _MOST_OF_FREE_MEMORY:
        return f"its inputs and results have {needed} bytes, and {free_bytes} are free"
    return ""


def _is_compact(form: Form) -> bool:
    """Tells whether a copy of a tensor has its strides: it has no gaps, and no element twice."""
    expected = 1
    for stride, size in sorted(zip(form.strides, form.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def wanted() -> str:
    """Reads "1" for graphs, "0" for none, "nccl" for graphs also of steps with collectives.

    Raises:
        EnvironmentProblem: If `SHARDCORE_CUDA_GRAPHS` is none of these.
    """
    return switches.chosen(VARIABLE, _VALUES, "1")


def _reason_against_call(call: Call, trace: Trace, *, takes_collectives: bool) -> str:
    if torch_private.is_of_collectives(call.operator) and not takes_collectives:
        return f"it starts collectives: {call.line}"
    if call.collective and torch_private.runs_on_gloo(call.args[-1], _GPU):
        return f"it starts collectives over gloo: {call.line}"
    if _READ_ON_HOST & set(call.operator.tags) or _has_number(call):
        return f"{call.operator} reads values on the host: {call.line}"
    on_host = any(_device(trace, value) != "cuda" for value in call.results)
    if on_host and call.operator not in _ATTENTION:
        return f"{call.operator} computes on the host: {call.line}"
    return ""


def _has_number(call: Call) -> bool:
    leaves = torch_private.tree_leaves((call.args, call.kwargs))
    return any(isinstance(leaf, Number) for leaf in leaves)


def _bytes(call: Call, trace: Trace) -> Iterator[int]:
    """Yields the bytes of each result of `call` that has memory that no operand has."""
    memories = trace.reads_of(call)
    for value in call.results:
        if trace.memory[value.number] not in memories:
            yield trace.form(value).bytes
