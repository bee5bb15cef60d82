"""A result is written into the memory of an operand whose last use it is."""

import pytest
import torch

from shardcore.adapters.capture.passes.memory import with_operands_reused
from shardcore.adapters.capture.recording.recorder import Recorder
from shardcore.adapters.capture.running.generated import function_of
from tests.traces import highest

ROWS, CLASSES = 64, 512
UNIT = 4 * 8 * ROWS * CLASSES  # the bytes of logits  # the bytes of logits


def improved(step, *tensors):
    """`step` after the pass, as a function of no operands; its results are the same."""
    recorder = Recorder(tensors)
    eager = recorder.run(lambda: step(*tensors))
    trace = with_operands_reused(recorder.trace)
    graph = function_of(trace, {number: trace.first_values[number] for number in trace.outside})
    for one, other in zip(eager, graph(*tensors), strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    return lambda: graph(*tensors)


def units(step, *tensors):
    """The peak memory of `step`, before and after the passes, in units of the logits."""
    after = improved(step, *tensors)
    return highest(lambda: step(*tensors)) / UNIT, highest(after) / UNIT


def made():
    """Logits, and the gradient of what softmax makes of them with the classes first."""
    return torch.randn(8, ROWS, CLASSES), torch.randn(8, CLASSES, ROWS)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_the_gradient_of_softmax_reuses_the_memory_of_the_incoming_gradient(name, dim):
    backward = getattr(torch.ops.aten, f"{name}_backward_data")

    def step(x, gradient):
        softmax = getattr(torch.ops.aten, name)(x, dim, False)
        return (backward(gradient * 2, softmax, dim, torch.float32),)

    gradient = made()[1]
    assert units(step, gradient + 1, gradient) == pytest.approx((3, 2), abs=0.2)


def test_a_pointwise_result_reuses_the_memory_of_an_operand_at_its_last_use():
    def step(x, y):
        return (torch.tanh(x @ y + 1),)

    x, y = torch.randn(8 * ROWS, CLASSES), torch.randn(CLASSES, CLASSES)
    assert units(step, x, y) == pytest.approx((2, 1), abs=0.1)


def test_a_result_may_reuse_the_memory_of_its_second_operand():
    def step(x, y):
        product = x @ y
        return (torch.sub(x, product, alpha=3),)

    x, y = torch.randn(8 * ROWS, CLASSES), torch.randn(CLASSES, CLASSES)
    assert units(step, x, y) == pytest.approx((2, 1), abs=0.1)


def read_later(x):
    made = x + 1
    return made * 2, made.sum()


def seen_twice(x):
    made = x + 1
    return (made + made.T,)


def turned(x):
    return ((x + 1).T * torch.ones(512, 512),)


def of_another_dtype(x):
    return ((x.int() + 1) / 2,)


@pytest.mark.parametrize("step", [read_later, seen_twice, turned, of_another_dtype])
def test_memory_that_is_still_read_or_does_not_fit_is_not_reused(step):
    improved(step, torch.randn(512, 512))


def test_a_result_does_not_reuse_larger_memory():
    def step(x):
        part = x.expand(3, -1, -1).clone()[0] * 2
        return (torch.cat([part, part, part]),)

    assert units(step, torch.randn(8 * ROWS, CLASSES)) == pytest.approx((4, 4), abs=0.1)


def test_inputs_and_outputs_are_not_overwritten():
    x = torch.randn(512, 512)
    before = x.clone()
    improved(lambda x: (x + 1, torch.relu(x)), x)()
    assert torch.equal(x, before)
