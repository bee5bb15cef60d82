"""The watch over memory: it is noted when an operator allocates it, and when nothing holds it."""

import gc

import torch

from shardcore.adapters.cost.memory import StepMemory
from shardcore.domain.cost.events import highest


def test_memory_is_held_as_long_as_a_tensor_or_a_view_has_it():
    tracer = StepMemory()
    with tracer.without_values(), tracer.tracing():
        x = torch.ones(4)
        view = (x * 2).view(2, 2)
        x.add_(1)
        del view
        y = torch.cat([x, x])
        torch.empty(100, device="meta")
    tracer.hold(y, "gradients")
    first, doubled, joined = tracer.allocations()
    assert [each.bytes for each in (first, doubled, joined)] == [16, 16, 32]
    assert first.end is None
    assert doubled.begin < doubled.end < joined.begin
    assert joined.kind == "gradients"
    assert highest(tracer.allocations()) == {"activations": 16, "gradients": 32}


def test_what_autograd_saves_is_held_until_the_backward_pass():
    tracer = StepMemory()
    with tracer.without_values():
        x = torch.ones(8, requires_grad=True)
        with tracer.tracing():
            y = x.exp().sin().sum()
            saved = [each.bytes for each in tracer.allocations() if each.end is None]
            y.backward()
    assert saved == [32, 4]  # exp's result, and the sum
    held = [each for each in tracer.allocations() if each.end is None]
    assert [each.bytes for each in held] == [4, 32]


def test_memory_in_a_reference_cycle_is_free_at_the_next_operator():
    tracer = StepMemory()
    with tracer.without_values(), tracer.tracing():
        cycle = [torch.ones(4)]
        cycle.append(cycle)
        del cycle
        torch.ones(4)
    first, second = tracer.allocations()
    assert first.end < second.begin
    assert gc.isenabled()
