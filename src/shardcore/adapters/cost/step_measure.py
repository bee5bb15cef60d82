"""The watch over a running step on the device of this rank: time, memory, collectives, work."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.flops import count_flops
from shardcore.adapters.torch_private import Operator
from shardcore.adapters.torch_private.trees import Args, Kwargs
from shardcore.domain.cost.machine import Machine, machine_with
from shardcore.domain.cost.step_figures import StepCounts
from shardcore.domain.errors import EnvironmentProblem


@attrs.define(eq=False)
class StepCounter:
    """The port `StepCounter`: counts while a step runs."""

    counts: StepCounts = attrs.field(factory=StepCounts)

    def before(self, operator: Operator, args: Args, _kwargs: object) -> bool:
        """Counts the operands of a collective, and has `after` called."""
        started = torch_private.collective_call(operator, args)
        moved = 0 if started is None else started.operand_bytes
        self.counts += StepCounts(collective_bytes=moved)
        return True

    def after(
        self, operator: Operator, args: Args, kwargs: Kwargs, _before: object, result: object
    ) -> None:
        """Counts the operations of an operator that has run."""
        self.counts += StepCounts(flops=count_flops(operator, (args, kwargs), result))


class _Measure:
    """The part of a measure that is alike on all devices.

    Args:
        machine: The machine whose peak counts; None if it is unknown.
    """

    def __init__(self, machine: Machine | None) -> None:
        self._machine = machine

    def peak_flops(self, dtype: str) -> float | None:
        """The operations of the device in a second with numbers of `dtype`; None if unknown."""
        return None if self._machine is None else self._machine.speed(dtype).flops

    @contextmanager
    def counting(self) -> Iterator[StepCounter]:
        """Opens a context in which each operator of this thread is counted, which takes time."""
        counter = StepCounter()
        with torch_private.OperatorListener(counter.before, counter.after):
            yield counter


class HostMeasure(_Measure):
    """The port `StepMeasure` for a device that computes while the host waits: a CPU."""

    def mark(self) -> float:
        """Marks this time."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """The seconds between two marks."""
        return end - begin

    def peak_memory(self) -> int:
        """The most bytes of memory that this process had at a time.

        Not `ru_maxrss`: a program that a large process starts inherits that of the large one.
        """
        with open("/proc/self/status", encoding="ascii") as status:
            lines = dict(line.split(":", 1) for line in status)
        return int(lines["VmHWM"].split()[0]) * 1024


class CudaMeasure(_Measure):
    """The port `StepMeasure` for a device that computes after the host has started the kernels.

    Marks are events on its stream: only `seconds` waits for it.
    """

    def mark(self) -> torch.cuda.Event:
        """Marks the end of what was started so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """The seconds between two marks. It waits for the later one."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def peak_memory(self) -> int:
        """The most bytes that tensors of this process had at a time on the device."""
        return torch.cuda.max_memory_allocated()


def measure_on(device: object, machine: Machine | None) -> HostMeasure | CudaMeasure:
    """Makes what measures steps on a device of torch, by its name.

    Args:
        device: The device of this rank.
        machine: The machine of all ranks; None to recognize a CUDA device by its name.

    Raises:
        EnvironmentProblem: If the device computes after the host, and has no events for it.
    """
    kind = torch.device(str(device)).type
    if kind == "cpu":
        return HostMeasure(machine)
    if kind != "cuda":
        raise EnvironmentProblem(
            f"StepStats measures steps on a CPU or a CUDA device, got {str(device)!r}.",
            name="StepStats",
            got=str(device),
        )
    return CudaMeasure(machine or machine_with(torch.cuda.get_device_name()))
