"""What a captured step holds at its highest, in the bytes that torch allocates and frees."""

from itertools import accumulate

import keras
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from shardcore.adapters.capture.generated import function_of
from shardcore.adapters.capture.passes.memory.reuse import with_operands_reused
from shardcore.adapters.capture.recorder import Recorder
from shardcore.testing import run_ranks

ROWS, CLASSES = 64, 512
UNIT = 4 * 8 * ROWS * CLASSES  # the bytes of logits


def highest(run):
    """The most that `run` has allocated at a time, and not freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    changes = [(each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"]
    return max(accumulate(size for _, size in sorted(changes, key=lambda change: change[0])))


def improved(step, *tensors):
    """What the passes make of `step`, as a function of no operands; its results are the same."""
    recorder = Recorder(tensors)
    eager = recorder.run(lambda: step(*tensors))
    tape = with_operands_reused(recorder.tape)
    graph = function_of(tape, {number: tape.found[number] for number in tape.outside})
    for one, other in zip(eager, graph(*tensors), strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    return lambda: graph(*tensors)


def units(step, *tensors):
    """The most that `step` holds as it is, and after the passes, in the bytes of logits."""
    after = improved(step, *tensors)
    return highest(lambda: step(*tensors)) / UNIT, highest(after) / UNIT


def made():
    """Logits, and the gradient of what softmax makes of them with the classes first."""
    return torch.randn(8, ROWS, CLASSES), torch.randn(8, CLASSES, ROWS)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_the_gradient_of_softmax_takes_the_place_of_that_of_its_result(name, dim):
    backward = getattr(torch.ops.aten, f"{name}_backward_data")

    def step(x, gradient):
        softmax = getattr(torch.ops.aten, name)(x, dim, False)
        return (backward(gradient * 2, softmax, dim, torch.float32),)

    gradient = made()[1]
    assert units(step, gradient + 1, gradient) == pytest.approx((3, 2), abs=0.2)


def test_a_pointwise_result_takes_the_place_of_an_operand_that_ends():
    def step(x, y):
        return (torch.tanh(x @ y + 1),)

    x, y = torch.randn(8 * ROWS, CLASSES), torch.randn(CLASSES, CLASSES)
    assert units(step, x, y) == pytest.approx((2, 1), abs=0.1)


def test_of_two_operands_the_second_one_may_end():
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
def test_nothing_is_written_where_somebody_still_reads_or_it_does_not_fit(step):
    improved(step, torch.randn(512, 512))


def test_a_result_keeps_no_memory_that_is_larger():
    def step(x):
        part = x.expand(3, -1, -1).clone()[0] * 2
        return (torch.cat([part, part, part]),)

    assert units(step, torch.randn(8 * ROWS, CLASSES)) == pytest.approx((4, 4), abs=0.1)


def test_what_is_returned_and_what_comes_in_stays():
    x = torch.randn(512, 512)
    before = x.clone()
    improved(lambda x: (x + 1, torch.relu(x)), x)()
    assert torch.equal(x, before)


def gathering(_rank):
    """Of each call of a step, how many operands it writes; one that it sends is read meanwhile."""
    collectives = torch.ops._c10d_functional
    group = torch.distributed.group.WORLD.group_name

    def step(x):
        made = x + 1
        gathered = collectives.all_gather_into_tensor(made, 2, group)
        return made * 2, collectives.wait_tensor(gathered)

    x = torch.randn(512, 512)
    recorder = Recorder([x])
    recorder.run(lambda: step(x))
    calls = with_operands_reused(recorder.tape).calls
    return [len(call.writes) for call in calls if call.operator.__name__.startswith("mul")]


def test_what_is_under_way_is_not_written_over():
    assert run_ranks(gathering, 2) == [[0], [0]]


def decoder(jit_compile):
    """A small language model: logits are the largest tensors of its step."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((32,), dtype="int32")
    x = keras.layers.Embedding(1024, 16)(tokens)
    x = x + keras.layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True)
    x = x + keras.layers.Dense(16)(keras.layers.Dense(64, activation="gelu")(x))
    model = keras.Model(tokens, keras.layers.Dense(1024)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=jit_compile)
    return model


def fitted(_rank, jit_compile):
    """The highest of a step, and the weights after some."""
    import shardcore

    shardcore.install()
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = decoder(jit_compile)
    batch = torch.randint(0, 1024, (16, 33), generator=torch.Generator().manual_seed(0)).numpy()
    x, y = batch[:, :-1], batch[:, 1:]
    model.fit(x, y, batch_size=16, epochs=6, verbose=0)
    held = highest(lambda: model.fit(x, y, batch_size=16, verbose=0))
    return held, model.get_weights()


def test_a_step_of_a_language_model_holds_less_captured():
    logits = 4 * 8 * 32 * 1024  # of a rank
    (eager, weights), *_ = run_ranks(fitted, 2, False)
    (captured, own), *_ = run_ranks(fitted, 2, "auto")
    assert captured <= eager - logits
    for one, other in zip(weights, own, strict=True):
        assert (one == other).all()
