"""What tests of passes share: a step is recorded and run before and after a pass."""

import torch

from shardcore.adapters.capture.graph import graph_of
from shardcore.adapters.capture.recorder import Recorder


def after(step, one_pass, *tensors):
    """The tape of `step` after a pass; its results, and what it leaves in memory, are the same."""
    copies = [each.clone() for each in tensors]
    recorder = Recorder(copies)
    recorder.run(lambda: step(*copies))
    tapes = recorder.tape, one_pass(recorder.tape)
    found = [_run(tape, tensors) for tape in tapes]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
    return tapes[1]


def names(tape):
    """Its operators, in order."""
    return [call.operator.__name__.partition(".")[0] for call in tape.calls]


def _run(tape, tensors):
    copies = [each.clone() for each in tensors]
    return *graph_of(tape, {n: tape.found[n] for n in tape.outside})(*copies), *copies
