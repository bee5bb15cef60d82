"""Buckets that keep their memory from run to run give the results of new buckets."""

import gc

import torch
import torch.distributed as dist

from shardcore.adapters.capture.generated import function_of
from shardcore.adapters.capture.passes.communication.sums import in_buckets
from shardcore.adapters.capture.passes.memory.kept_buckets import Memories, with_kept_buckets
from shardcore.adapters.capture.passes.memory.reuse import with_operands_reused
from shardcore.adapters.capture.recorder import Recorder
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


def tape_of(*tensors):
    recorder = Recorder(tensors)
    recorder.run(lambda: step(*tensors))
    return with_operands_reused(in_buckets(recorder.tape))


def operands(rank, number=0, rows=4, columns=8):
    generator = torch.Generator().manual_seed(10 * rank + number)
    sizes = (rows, columns), (columns, rows)
    return [torch.randn(size, generator=generator) for size in sizes]


def copies(made):
    """Outputs as a program gives them: the next run writes into the buckets."""
    return [each.clone() for each in made]


def names(tape):
    return [str(call.operator).removeprefix("aten.") for call in tape.calls]


def test_products_are_made_in_the_bucket_and_the_rest_is_copied():
    def program(rank):
        tape = with_kept_buckets(tape_of(*operands(rank)), Memories())
        (copy,) = (call for call in tape.calls if "_foreach_copy_" in str(call.operator))
        return names(tape), len(copy.args[0])

    first, second = run_ranks(program, 2)
    assert first == second
    found, copied = first
    assert found.count("mm.out") == 2  # of seven: four are read again, one is an exponential
    assert copied == 5
    assert not {"flatten_dense_tensors.default", "split_with_sizes.default"} & set(found)


def test_each_run_gives_its_own_results():
    def program(rank):
        tape = tape_of(*operands(rank))
        modules = [function_of(each, {}) for each in (tape, with_kept_buckets(tape, Memories()))]
        before, now = ([copies(module(*operands(rank, n))) for n in range(3)] for module in modules)
        for ones, others in zip(before, now, strict=True):
            assert len(ones) == 9
            assert all(map(torch.equal, ones, others))

    run_ranks(program, 2)


def test_programs_share_the_memory_and_a_program_has_it_once_for_each_bucket():
    def program(rank):
        memories = Memories()
        tape = tape_of(*operands(rank))
        tapes = [with_kept_buckets(tape, memories) for _ in range(2)]
        places = [{each.untyped_storage().data_ptr() for each in t.kept.values()} for t in tapes]
        one, other = memories.taken([tape.form(tape.inputs[0])] * 2)
        return places[0] == places[1], len(places[0]), one is other

    assert run_ranks(program, 2) == [(True, 1, False)] * 2


def test_the_memory_is_there_as_long_as_a_program_that_has_it():
    def program(rank):
        memories = Memories()
        tape = tape_of(*operands(rank))
        module = function_of(with_kept_buckets(tape, memories), {})
        gc.collect()
        held = len(memories)
        del module
        gc.collect()
        return held, len(memories)

    assert run_ranks(program, 2) == [(1, 0)] * 2
