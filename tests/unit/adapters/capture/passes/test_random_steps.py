"""Random steps give the same bits after all passes, and change the same memory."""

import functools
import random

import pytest
import torch

from shardcore.adapters.capture import passes
from shardcore.adapters.capture.passes.sums import Memories
from shardcore.adapters.capture.recording.recorder import Recorder
from shardcore.adapters.capture.running.generated import function_of

STEPS, LENGTH = 12, 30
SHAPE = (4, 6, 5, 3)
FIRST = {"memory_format": torch.contiguous_format}


def step(seed, *tensors):
    """Some operators on tensors of all kinds: views, broadcasts, writes, lists, images."""
    draw = random.Random(seed)
    pool = [each.clone() for each in tensors]
    own = list(pool)
    for _ in range(LENGTH):
        pool += draw.choice(OPERATORS)(draw, pool)
    return *draw.sample(pool, 3), *own, torch.stack([each.double().sum() for each in pool]).sum()


def one(pool, draw, fits=lambda x: True):
    return draw.choice([each for each in pool if fits(each)] or pool[:1])


def is_whole(x):
    return x.shape == SHAPE


def pointwise(draw, pool):
    x, y = one(pool, draw, is_whole), one(pool, draw, is_whole)
    return [draw.choice([torch.add, torch.mul, torch.sub, torch.maximum])(x, y)]


def alone(draw, pool):
    x = one(pool, draw)
    return [draw.choice([torch.tanh, torch.neg, torch.relu, torch.abs, lambda x: x / 3])(x)]


def row(draw, pool):
    """An expanded mean, which is equal for each row."""
    x = one(pool, draw, is_whole)
    kept = draw.choice([(0,), (0, 1), (0, 1, 2), (1, 3)])
    return [x.mean(kept, keepdim=True).expand(SHAPE)]


def scaled(draw, pool):
    x = one(pool, draw, lambda x: is_whole(x) and 0 in x.stride())
    return [draw.choice([lambda x: x / 24, lambda x: x * 2, torch.neg])(x)]


def part(draw, pool):
    x = one(pool, draw, is_whole)
    mine = draw.choice([x.chunk(2), x.split([1, 3]), x.split(1)])[-1]
    return [mine.clone() if draw.random() < 0.5 else mine]


def turned(draw, pool):
    x = one(pool, draw, is_whole)
    there, back = draw.choice([((0, 3, 1, 2), (0, 2, 3, 1)), ((1, 0, 2, 3), (1, 0, 2, 3))])
    x = x.permute(there).clone(**FIRST)
    return [draw.choice([x, x.permute(back), x.permute(back).clone(**FIRST)])]


def image(draw, pool):
    x = one(pool, draw, is_whole).permute(0, 3, 1, 2).clone(**FIRST)
    return [torch.nn.functional.max_pool2d(x, 2).permute(0, 2, 3, 1)]


def viewed(draw, pool):
    x = one(pool, draw)
    return [draw.choice([x.unsqueeze(0).squeeze(0), x.reshape(x.shape), x.detach(), x.flatten()])]


def written(draw, pool):
    x = one(pool, draw, lambda x: 0 not in x.stride())
    return [draw.choice([x.mul_, x.sub_])(0.5)]


def of_a_list(draw, pool):
    x, y = one(pool, draw, is_whole), one(pool, draw, is_whole)
    return torch._foreach_mul(torch._foreach_add([x, y], 1.0), [y, x])


def repeated(draw, pool):
    """The same calls again, which another call may come between, or write into an operand."""
    x = one(pool, draw)
    return [(x.sigmoid() * torch.tensor(2.0)).detach(), x.sigmoid() * torch.tensor(2.0)]


def of_constants(draw, pool):
    """A product with a table of constants, which may be a result, or written into."""
    table = (torch.arange(3.0) * torch.tensor(0.5)).cos()
    parts = draw.choice([[], [table], [table[1:], table.mul_(2)]])
    return [one(pool, draw, is_whole) * table, *parts]


OPERATORS = [pointwise, alone, scaled, row, part, turned, image, viewed, written]
OPERATORS += [of_a_list, repeated, of_constants]


def better(trace):
    """`trace` after all passes."""
    return passes.run_passes(trace, Memories(), literals=literals_of(trace))


def literals_of(trace):
    return {number: trace.first_values[number] for number in trace.outside}


@pytest.mark.parametrize("first", range(0, 5 * STEPS, STEPS))
def test_passes_change_no_bit(first):
    generator = torch.Generator().manual_seed(first)
    for seed in range(first, first + STEPS):
        tensors = [torch.randn(SHAPE, generator=generator) for _ in range(3)]
        copies = [each.clone() for each in tensors]
        recorder = Recorder(copies)
        expected = recorder.run(functools.partial(step, seed, *copies))
        trace = better(recorder.trace)
        assert len(trace.calls) < len(recorder.trace.calls)
        found = function_of(trace, literals_of(trace))(*(each.clone() for each in tensors))
        for place, (one_, other) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one_, other), f"result {place} of step {seed}"
