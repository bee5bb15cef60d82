"""Records an all-reduce of each gradient, while buckets of them are reduced (ADR 17).

A captured step knows all gradients, and forms better buckets. The recorded step itself reduces
buckets: with an all-reduce for each gradient it would take several times as long.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch

from shardcore.adapters.capture.recording.recorder import Recorder, recording
from shardcore.adapters.torch_private import collectives

_HOOK = "change gradients in train_step, after the backward pass"


@attrs.define
class RecordedGradients:
    """The all-reduces of gradients in a trace; none while no step is recorded."""

    _by_parameter: dict[int, "_RecordedGradient"] = attrs.field(factory=dict, init=False)

    def add(self, parameter: torch.Tensor, gradient: Any) -> None:
        """Records the all-reduce of `gradient`, which joins a bucket.

        A captured step would not merge sums over several axes: the second one of each reads the
        first. So their bucket is recorded as it is.
        """
        pending, part = gradient.form.layout.partial, gradient.part
        recorder = recording() if len(pending) == 1 and gradient.form.is_pending else None
        if recorder is None:
            return
        with recorder.paused():
            result = part.new_empty(part.shape)
        ((axis, _),) = pending
        operands = (part, "sum", gradient.engine.groups[axis].group_name)
        recorder.append(collectives.all_reduce_out_of_place(), operands, result)
        recorded_sum = _RecordedGradient(gradient, gradient.memory.writes, result)
        self._by_parameter[id(parameter)] = recorded_sum

    def take(self, parameters: Sequence[torch.Tensor]) -> "RecordedBucket":
        """Removes and returns the sums of a bucket that is sent."""
        sums = list(map(self._take, parameters))
        return RecordedBucket(sums, recording() if any(sums) else None)

    def _take(self, parameter: torch.Tensor) -> "_RecordedGradient | None":
        """Refuses the trace if a hook of the user has changed the gradient since."""
        recorded_sum, recorder = self._by_parameter.pop(id(parameter), None), recording()
        if recorded_sum is None or recorder is None or recorded_sum.is_of(parameter.grad):
            return recorded_sum
        recorder.refuse("a hook of a parameter changes its gradient", _HOOK)
        return None


@attrs.frozen(eq=False)
class RecordedBucket:
    """The sums of a bucket; None for a gradient whose all-reduce is not recorded."""

    sums: Sequence["_RecordedGradient | None"]
    recorder: Recorder | None

    def unrecorded(self) -> AbstractContextManager[None]:
        """Opens a context in which the bucket is reduced, which is not to be on the trace."""
        return nullcontext() if self.recorder is None else self.recorder.paused()

    def results(self, gradients: Iterable[Any]) -> Iterator[Any]:
        """Copies the reduced gradients of the bucket into the memory of those of the trace."""
        for recorded_sum, gradient in zip(self.sums, gradients, strict=True):
            if recorded_sum is None:
                yield gradient
                continue
            result, form = recorded_sum.result, gradient.form
            result.copy_(gradient.part)
            yield gradient.engine.sharded(result, form.layout, form.shape)


@attrs.frozen(eq=False)
class _RecordedGradient:
    """The all-reduce of one gradient in a trace.

    Args:
        gradient: The gradient, a sharded tensor.
        writes: The writes into it before.
        result: The local shard of the reduced gradient in the trace.
    """

    gradient: Any
    writes: int
    result: torch.Tensor

    def is_of(self, gradient: object) -> bool:
        """Compares writes too: a hook may have changed the recorded gradient in place."""
        return self.gradient.memory.writes == self.writes and gradient is self.gradient
