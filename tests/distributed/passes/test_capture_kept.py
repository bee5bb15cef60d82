"""Buckets that keep their memory from run to run give the results of new buckets."""

import gc

import torch
import torch.distributed as dist

from shardcore.adapters.capture.passes.collectives import with_late_waits
from shardcore.adapters.capture.passes.memory import with_operands_reused
from shardcore.adapters.capture.passes.sums import Memories, in_buckets
from shardcore.adapters.capture.recording.recorder import Recorder
from shardcore.adapters.capture.running.generated import function_of
from shardcore.adapters.torch_private import collectives
from shardcore.testing import run_ranks


def reduced(x):
    return collectives.wait(collectives.all_reduce(x, "sum", dist.group.WORLD))


def step(x, y):
    """Sums of products, of one that is read again, of one of views, of one twice, and of none."""
    product = x @ y
    read_again = x.t() @ x
    viewed = (y @ x).view(1, -1)
    twice = y.t() @ x.t()
    sent = (product, read_again, viewed, twice, twice, x.exp(), product.t() @ product)
    sums = [reduced(each) for each in sent]
    return *sums, sums[0] * 2, read_again + 1


def trace_of(memories, *tensors):
    """The trace of `step`; without memories its buckets are made in each run."""
    recorder = Recorder(tensors)
    recorder.run(lambda: step(*tensors))
    return with_operands_reused(with_late_waits(in_buckets(recorder.trace, memories)))


def operands(rank, number=0, rows=4, columns=8):
    generator = torch.Generator().manual_seed(10 * rank + number)
    sizes = (rows, columns), (columns, rows)
    return [torch.randn(size, generator=generator) for size in sizes]


def copies(made):
    """Outputs as a program gives them: the next run writes into the buckets."""
    return [each.clone() for each in made]


def names(trace):
    return [str(call.operator).removeprefix("aten.") for call in trace.calls]


def test_products_are_made_in_the_bucket_and_the_rest_is_copied():
    def program(rank):
        trace = trace_of(Memories(), *operands(rank))
        (copy,) = (call for call in trace.calls if "_foreach_copy_" in str(call.operator))
        return names(trace), len(copy.args[0])

    first, second = run_ranks(program, 2)
    assert first == second
    found, copied = first
    assert found.count("mm.out") == 2  # of seven: four are read again, one is an exponential
    assert copied == 5
    assert not {"flatten_dense_tensors.default", "split_with_sizes.default"} & set(found)


def test_each_run_gives_its_own_results():
    def program(rank):
        traces = [trace_of(memories, *operands(rank)) for memories in (None, Memories())]
        modules = [function_of(each, {}) for each in traces]
        before, now = ([copies(module(*operands(rank, n))) for n in range(3)] for module in modules)
        for ones, others in zip(before, now, strict=True):
            assert len(ones) == 9
            assert all(map(torch.equal, ones, others))

    run_ranks(program, 2)


def test_programs_share_the_memory_and_a_program_has_it_once_for_each_bucket():
    def program(rank):
        memories = Memories()
        traces = [trace_of(memories, *operands(rank)) for _ in range(2)]
        places = [
            {each.untyped_storage().data_ptr() for each in t.buffers.values()} for t in traces
        ]
        form = traces[0].form(traces[0].inputs[0])
        one, other = (memories.buffer(form, number) for number in range(2))
        return places[0] == places[1], len(places[0]), one is other

    assert run_ranks(program, 2) == [(True, 1, False)] * 2


def test_the_memory_is_there_as_long_as_a_program_that_has_it():
    def program(rank):
        memories = Memories()
        module = function_of(trace_of(memories, *operands(rank)), {})
        gc.collect()
        held = len(memories)
        del module
        gc.collect()
        return held, len(memories)

    assert run_ranks(program, 2) == [(1, 0)] * 2
