"""The pass manager refuses passes in a wrong order, and names a pass that breaks its promise."""

import attrs
import pytest
import torch

from shardcore.adapters.capture import passes
from shardcore.adapters.capture.passes import Fact, Pass, Pipeline
from shardcore.adapters.capture.passes.sums import Memories
from shardcore.adapters.capture.recording.recorder import Recorder
from shardcore.adapters.capture.trace import Call
from shardcore.domain.capture import NotCaptured


def step(x, state):
    """Draws twice, writes into a tensor from outside, and returns a new one."""
    noise = torch.rand(3) + torch.randn(3)
    state.add_(x)
    state.mul_(2)
    return x * 2 + noise


@pytest.fixture
def trace():
    recorder = Recorder([x := torch.ones(3)])
    state = torch.zeros(3)
    recorder.run(lambda: step(x, state))
    return recorder.trace


def without(name):
    """A pass that drops the last call whose operator has this name."""

    def drop(trace):
        calls = list(trace.calls)
        calls.remove(next(call for call in reversed(calls) if name in str(call.operator)))
        return trace.with_calls(calls)

    return Pass(drop)


def reversed_calls(trace):
    return trace.with_calls(reversed(trace.calls))


def with_other_outputs(trace):
    return attrs.evolve(trace.with_calls(trace.calls), outputs=[trace.outputs, trace.outputs])


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (without("mul_"), "writes"),
        (without("rand.default"), "draws"),
        (without("mul.Tensor"), "the order of calls"),
        (Pass(reversed_calls), "the order of calls"),
        (Pass(with_other_outputs), "outputs"),
    ],
)
def test_a_pass_that_loses_what_a_step_does_is_named(trace, broken, what):
    *first, last = passes.passes_of(Memories())
    assert len(Pipeline((*first, last))(trace).calls) <= len(trace.calls)
    with pytest.raises(NotCaptured, match=f"pass '{broken.name}' does not keep {what}"):
        Pipeline((*first, broken, last))(trace)


def send(name, result, trace):
    operator = getattr(torch.ops._c10d_functional, name).default
    operand = trace.inputs[0]
    args = (operand, "sum", "0") if name == "all_reduce" else (operand, 2, "0")
    return Call(operator, args, {}, result)


def with_sends(trace, *names):
    found = trace.with_calls(trace.calls)
    form = found.form(found.inputs[0])
    found.calls += [send(name, found.new(form), found) for name in names]
    return found


def swapped(trace):
    return trace.with_calls([*trace.calls[:-2], *reversed(trace.calls[-2:])])


def sent_twice(trace):
    return with_sends(trace, "all_gather_into_tensor")


@pytest.mark.parametrize(
    ("run", "joins", "what"),
    [(swapped, False, "collectives"), (sent_twice, False, "collectives"), (sent_twice, True, None)],
)
def test_collectives_are_what_a_pass_declares(trace, run, joins, what):
    sending = with_sends(trace, "all_reduce", "all_gather_into_tensor")
    pipeline = Pipeline((Pass(run, joins=joins),))
    if what is None:
        pipeline(sending)
        return
    with pytest.raises(NotCaptured, match=f"'{run.__name__}' does not keep {what}:"):
        pipeline(sending)


@pytest.mark.parametrize("memories", [None, Memories()])
def test_passes_stand_where_all_that_they_need_holds(memories):
    Pipeline(passes.passes_of(memories))
    Pipeline(passes.PASSES_FOR_COMPILER)


def test_a_pass_without_the_facts_that_it_needs_is_refused():
    (each,) = (each for each in passes.passes_of(None) if Fact.UNREAD_LOSS in each.needs)
    with pytest.raises(AssertionError, match=f"pass '{each.name}' stands where this may not hold"):
        Pipeline((each,))


def test_no_pass_follows_one_that_breaks_what_it_needs():
    assert passes.OPERANDS_REUSED.breaks == {Fact.NEW_MEMORY}
    with pytest.raises(AssertionError, match="dead operand"):
        Pipeline((passes.OPERANDS_REUSED, passes.DIRECT_VIEWS))
