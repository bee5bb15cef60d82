"""Programs of steps: a step is recorded twice, and run from the trace if both agree (ADR 16)."""

from collections.abc import Callable, Container, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from functools import cached_property
from types import MappingProxyType
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture import passes
from shardcore.adapters.capture.analyses import allocations_of
from shardcore.adapters.capture.passes.checks import Rollback, rollback_of, with_checks
from shardcore.adapters.capture.passes.slices import SliceCalls
from shardcore.adapters.capture.passes.sums import Memories
from shardcore.adapters.capture.recording import comparison, functions
from shardcore.adapters.capture.recording.recorder import Recorder, recording
from shardcore.adapters.capture.recording.without_values import RecorderWithoutValues
from shardcore.adapters.capture.running import cuda_graphs
from shardcore.adapters.capture.running.counts import flops_of, sent_bytes, started_collectives
from shardcore.adapters.capture.running.executors import Executors
from shardcore.adapters.capture.trace import Literals, Trace, Value, numbered, values
from shardcore.domain.capture import NotCaptured, TracesDiffer
from shardcore.domain.cost.events import Allocation
from shardcore.domain.cost.step_figures import StepCounts
from shardcore.domain.errors import describe_error, one_line
from shardcore.ports.capture import Observer, Program, RecordedSum, StartedCollective, StepTrace


@attrs.frozen
class RecordedProgram:
    """The port `Program`: a function, and the tensors from outside that it takes.

    Args:
        run: The function: takes the inputs and `captured_inputs`, returns the tensors among the
            outputs.
        captured_inputs: Tensors and generators from outside, which each run reads and writes.
        overwritten: The indices of the inputs that a run overwrites.
        outputs: The results of the step, tensors as `Value`.
        shared: The indices of the outputs, among tensors, in memory that others hold or write into.
        trace: Its trace, to compare with a step with batches of another size.
        literals: By number, its constants.
        collectives: Its collectives, in order.
        collective_bytes: The bytes of their operands.
        rollback: Undoes the writes of a run if a check fails.
        remark: The reason why Inductor did not compile it, if it should have; else empty.
    """

    run: Callable[..., tuple[Any, ...]]
    captured_inputs: tuple[Any, ...]
    overwritten: Set[int]
    outputs: Any
    shared: Set[int]
    trace: Trace
    literals: Literals
    collectives: tuple[StartedCollective, ...]
    collective_bytes: int
    rollback: Rollback
    remark: str

    @cached_property
    def counts(self) -> StepCounts:
        """Counts what a run of it sends, and what the recorded step computed."""
        return StepCounts(self.collective_bytes, sum(flops_of(self.trace)))

    def __call__(self, inputs: Sequence[Any], *, owned: bool = False) -> Any:
        """Runs it.

        Raises:
            GuardFailed: If the step reads another number on the host; nothing is done then.
        """
        if self.overwritten and not owned:
            inputs = _copy_at(inputs, self.overwritten)
        # Below autograd, as it was recorded.
        with torch.inference_mode(), self.rollback.undo_on_failure(inputs):
            made = self.run(*inputs, *self.captured_inputs)
        # Inference tensors are of no use outside, where they may need gradients.
        results = iter(_copy_at(made, self.shared if owned else range(len(made))))
        return torch_private.tree_map(
            lambda leaf: next(results) if isinstance(leaf, Value) else leaf, self.outputs
        )


def _copy_at(tensors: Sequence[torch.Tensor], indices: Container[int]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [tensor.clone() if n in indices else tensor for n, tensor in enumerate(tensors)]


class TraceCapture:
    """The port `StepCapture`: programs are functions that are generated from traces.

    Args:
        slice_calls: Finds the calls for one slice of large values; None leaves these whole.
    """

    def __init__(self, slice_calls: SliceCalls | None = None) -> None:
        self._slice_calls = slice_calls
        self._memories = Memories()
        self._executors = Executors()
        cuda_graphs.wanted()  # a wrong variable is an error of install(), not of a step
        self._setting = comparison.CaptureSetting.of_environment()

    def close(self) -> None:
        """Removes our operators from torch, and drops all CUDA graphs: no program runs any more."""
        self._executors.close()

    def record(
        self, step: Callable[[], Any], inputs: Sequence[Any], observer: Observer, donated: int = 0
    ) -> tuple[Any, Trace]:
        """Runs `step` and records its trace."""
        recorder = Recorder(inputs, observer)
        recorder.trace.donated = donated
        return recorder.run(step), recorder.trace

    def record_without_values(
        self, step: Callable[[], Any], inputs: Sequence[Any], observer: Observer
    ) -> Trace:
        """Records the trace of `step`, run without values; one that needs them is refused."""
        recorder = RecorderWithoutValues(inputs, observer)
        try:
            recorder.run(step)
        except Exception as error:  # noqa: BLE001 - it runs with values then: an own error comes again
            recorder.trace.refusal = f"without values it fails ({one_line(describe_error(error))})"
        return recorder.trace

    @property
    def at_once(self) -> bool:
        """Whether steps are recorded from the first one on, whether it pays or not."""
        return self._setting.at_once

    @property
    def audit_interval(self) -> int:
        """One in so many captured steps is audited; 0 if none is."""
        return self._setting.audit_interval

    def audit(
        self,
        step: Callable[[], Any],
        inputs: Sequence[Any],
        programs: Sequence[Program],
    ) -> Any:
        """Runs `step` eagerly, and compares its operators with those of `programs`."""
        recorded = [program for program in programs if isinstance(program, RecordedProgram)]
        sources = [comparison.Source(program.trace, program.literals) for program in recorded]
        auditor = comparison.Auditor(inputs, sources)
        outputs = auditor.run(step)
        auditor.check_end()
        return outputs

    def program(
        self,
        earlier: StepTrace | Program | None,
        trace: StepTrace,
        *,
        compiled: bool = False,
        all_reduces: Sequence[RecordedSum] | None = None,
    ) -> RecordedProgram:
        """Makes the program of `trace`, if the earlier one is the same or there is none."""
        assert isinstance(trace, Trace)
        if earlier is None:
            literals: dict[int, torch.Tensor] = {}
        elif isinstance(earlier, RecordedProgram):
            literals = comparison.literals_of_other_size(
                earlier.trace, earlier.literals.keys(), trace
            )
        else:
            assert isinstance(earlier, Trace)
            if differs := comparison.difference(earlier, trace):
                raise TracesDiffer(differs)
            literals = comparison.literals(earlier, trace)
        if trace.draws_on_host:
            raise NotCaptured(
                "Python or NumPy draws random numbers in it: draw by keras.random, with a "
                "SeedGenerator of the layer"
            )
        checked = with_checks(trace, literals)
        better = self._better(checked, all_reduces, literals, compiled=compiled)
        captured_inputs = tuple(
            value for number, value in trace.outside.items() if number not in literals
        )
        executor = self._executors.executor(better, captured_inputs, literals, compiled=compiled)
        return RecordedProgram(
            executor.run,
            captured_inputs,
            _overwritten(better, checked),
            trace.outputs,
            _shared(better),
            # Without its constants, and copies of small tensors: the program has what it needs.
            attrs.evolve(trace, first_values={}, outside=trace.outside | dict.fromkeys(literals)),
            literals,
            tuple(started_collectives(better, in_graph=executor.is_replayed)),
            sum(sent_bytes(better)),
            rollback_of(better, captured_inputs),
            executor.remark,
        )

    def allocations(
        self,
        step: Callable[[], object],
        inputs: Sequence[torch.Tensor],
        gradients: Callable[[], Iterable[torch.Tensor]],
        within: AbstractContextManager[object],
    ) -> list[Allocation]:
        """Lists the memory that a program of `step` takes; all tensors are without values."""
        assert isinstance(within, torch_private.WithoutValues)
        recorder = RecorderWithoutValues(inputs, within=within)
        recorder.run(step)
        if recorder.trace.refusal:
            raise NotCaptured(recorder.trace.refusal)
        values_of_gradients = filter(None, map(recorder.value_of, gradients()))
        return allocations_of(
            self._better(with_checks(recorder.trace, {})), list(values_of_gradients)
        )

    def _better(
        self,
        trace: Trace,
        all_reduces: Sequence[RecordedSum] | None = None,
        literals: Literals = MappingProxyType({}),
        *,
        compiled: bool = False,
    ) -> Trace:
        memories = None if compiled or trace.reshapes else self._memories
        return passes.run_passes(trace, memories, all_reduces, literals, self._slice_calls)

    def is_recording(self) -> bool:
        """Asks for this thread alone."""
        return recording() is not None

    def hooks_of(self, module: object) -> list[Any]:
        """Lists the hooks of a torch module, of its forward and backward pass."""
        assert isinstance(module, torch.nn.Module), f"{type(module).__name__} is no torch module"
        return torch_private.hooks_of(module)

    def active_mode(self) -> str:
        """Names a mode that this thread is in and that a program would not call."""
        return torch_private.active_mode()

    def hook_registries(self) -> list[dict[int, Any]]:
        """Lists the dicts of the hooks that all torch modules call."""
        return torch_private.hook_registries()

    @property
    def metadata_of(self) -> Callable[[torch.Tensor], tuple[Any, ...]]:
        """Reads what changes of a tensor without an operator: its gradient's flag, its hooks."""
        return torch_private.METADATA_OF

    @property
    def dict_version(self) -> Callable[[dict[Any, Any]], int]:
        """Numbers the states of a dict: as long as it is not changed, its number is the same."""
        return torch_private.DICT_VERSION

    def generator(self, seed: torch.Tensor) -> torch.Generator:
        """Makes a generator with the value of `seed`; a trace has it as one call."""
        recorder = recording()
        if recorder is None:
            return functions.seeded_generator(seed)
        generator: torch.Generator = recorder.as_one_call(functions.seeded_generator, (seed,), {})
        return generator

    def drawn(self, draw: Callable[..., Any], seed: torch.Tensor, operands: dict[str, Any]) -> Any:
        """Runs `draw` for the number in `seed`: one call of the trace."""
        recorder = recording()
        assert recorder is not None, "no step is being recorded"
        return recorder.as_one_call(functions.seeded_by_tensor(draw), (seed,), operands)

    def recomputation(self) -> functions.RecomputationContexts:
        """Makes the contexts of a forward pass that begins now, and of its recomputations."""
        recorder = recording()
        assert recorder is not None, "no step is being recorded"
        return functions.recomputation_contexts(recorder.as_one_call)


def _overwritten(trace: Trace, before: Trace) -> Set[int]:
    """Lists the indices of the inputs that a pass has made the step overwrite."""
    memories = trace.overwritten() - before.overwritten()
    return {
        index for index, value in enumerate(trace.inputs) if trace.memories([value]) <= memories
    }


def _shared(trace: Trace) -> Set[int]:
    """Lists the indices of the output tensors in memory of others or of the program.

    The caller owns the donated inputs.
    """
    others = map(numbered, (*trace.outside, *trace.buffers))
    memories = trace.memories((*trace.inputs[trace.donated :], *others))
    return {
        n for n, value in enumerate(values(trace.outputs)) if trace.memories([value]) & memories
    }
