"""A trace of some blocks, extended to more of them, beside a trace of all."""

import attrs
import pytest

from shardcore.domain.cost.events import (
    TICK,
    Allocation,
    BlockSpan,
    Operators,
    TracedCollective,
    TracedMemory,
    TracedStep,
    Work,
)
from shardcore.domain.cost.rank_step import step_on
from shardcore.domain.cost.reasons import CollectiveFacts
from shardcore.domain.cost.repeats import with_all_blocks
from shardcore.domain.cost.runs import Run
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.variable_size import ShardedVariable

MESH = Mesh((2,), ("data",))
ACTIVATION, PEAK, GRADIENT = 10, 100, 7


def work(flops):
    return Work("mm", "float32", flops, 1, updates=False)


def step_of(count, odd=None):
    """Returns a step of `count` blocks, written by hand; block number `odd` computes more.

    Each block holds its output for its backward pass, and a large tensor while it runs. The output
    of the last block is freed by the first operator behind it. A block's gradient of its input is
    freed in the block before.
    """
    memory, spans, started, time = [], [], [], 0
    outputs, gradients = {}, {}
    operators = [
        Operators(work(3 if number == odd else 2), f"b{number}") for number in range(count)
    ]
    shares = tuple((f"b{number}", 8) for number in range(count))
    update = Work("adam", "float32", 0, 8 * count + 5, updates=True)
    operators += [Operators(work(50)), Operators(update, shares=shares)]
    for number in range(count):
        weight = ShardedVariable(f"b{number}/kernel", (2,), (None,), 4)
        memory.append(TracedMemory(Allocation("variables", 8, 0), f"b{number}", weight))

    def tick():
        nonlocal time
        time += TICK
        return time

    for number in range(count):
        name = f"b{number}"
        spans.append(BlockSpan(tick(), name))
        outputs[number] = tick()
        begin = tick()
        memory.append(TracedMemory(Allocation("activations", PEAK, begin, tick()), name))
    spans.append(BlockSpan(tick()))
    memory.append(TracedMemory(Allocation("activations", 33, tick(), tick())))
    for number in reversed(range(count)):
        name = f"b{number}"
        spans.append(BlockSpan(tick(), name))
        gradients[number] = tick()
        memory.append(
            TracedMemory(Allocation("activations", ACTIVATION, outputs[number], tick()), name)
        )
        facts = CollectiveFacts(
            "all_reduce", "backward", ("data",), (), 8, reduced=(f"{name}/kernel",)
        )
        started.append(TracedCollective(facts, tick(), name, "float32"))
        summed = Allocation("gradients", 8, tick())
        memory.append(
            TracedMemory(
                summed, name, ShardedVariable(f"{name}/kernel", (2,), (None,), 4), facts.reduced[0]
            )
        )
        if number + 1 < count:
            one = Allocation("activations", GRADIENT, gradients[number + 1], tick())
            memory.append(TracedMemory(one, f"b{number + 1}"))
    spans.append(BlockSpan(tick()))
    end = tick()
    memory.append(TracedMemory(Allocation("activations", GRADIENT, gradients[0], tick()), "b0"))
    return TracedStep(
        MESH, tuple(operators), tuple(started), tuple(memory), (BlockSpan(0), *spans), end
    )


def renamed(step, count):
    """Returns the step of four blocks with the names of the first two and the last two."""
    names = {f"b{n}": f"b{n if n < 2 else count - 4 + n}" for n in range(4)}
    text = {f"{old}/kernel": f"{new}/kernel" for old, new in names.items()}

    def held(each):
        stored = each.stored and attrs.evolve(each.stored, path=text[each.stored.path])
        block, sum_of = names.get(each.block, ""), text.get(each.sum_of, "")
        return attrs.evolve(each, block=block, stored=stored, sum_of=sum_of)

    def started(each):
        facts = attrs.evolve(each.facts, reduced=(text[each.facts.reduced[0]],))
        return attrs.evolve(each, block=names[each.block], facts=facts)

    def operators(each):
        shares = tuple((names[name], size) for name, size in each.shares)
        return attrs.evolve(each, block=names.get(each.block, ""), shares=shares)

    spans = tuple(attrs.evolve(each, block=names.get(each.block, "")) for each in step.spans)
    return attrs.evolve(
        step,
        operators=tuple(map(operators, step.operators)),
        collectives=tuple(map(started, step.collectives)),
        memory=tuple(map(held, step.memory)),
        spans=spans,
    )


@pytest.mark.parametrize("count", [5, 9])
def test_a_lengthened_step_costs_what_the_trace_of_all_blocks_costs(count):
    run = Run(tuple(f"b{number}" for number in range(count)))
    longer = with_all_blocks(renamed(step_of(4), count), run)
    found, expected = step_on(MESH, longer), step_on(MESH, step_of(count))
    assert set(found.work) == set(expected.work)
    assert found.collectives == expected.collectives
    assert found.memory == expected.memory
    assert sum(found.memory.values()) > PEAK + count * ACTIVATION


def test_inner_blocks_that_differ_show_no_others():
    run = Run(tuple(f"b{number}" for number in range(9)))
    assert with_all_blocks(renamed(step_of(4, odd=0), 9), run) is not None
    assert with_all_blocks(renamed(step_of(4, odd=1), 9), run) is None


def test_memory_that_is_free_far_away_shows_no_others():
    step = step_of(4)
    far = [
        attrs.evolve(each, allocation=attrs.evolve(each.allocation, end=step.collectives[3].time))
        if each.block == "b2" and each.allocation.bytes == ACTIVATION
        else each
        for each in step.memory
    ]
    run = Run(tuple(f"b{number}" for number in range(9)))
    assert with_all_blocks(renamed(attrs.evolve(step, memory=tuple(far)), 9), run) is None


@pytest.mark.parametrize("count", [2, 3, 4])
def test_of_few_blocks_all_are_traced(count):
    run = Run(tuple("abcd")[:count])
    assert run.traced == run.paths
    assert with_all_blocks(step_of(4), run) == step_of(4)
