"""A step that was traced on a small mesh, on a large one."""

from shardcore.domain.cost.events import (
    Allocation,
    Operators,
    TracedCollective,
    TracedMemory,
    TracedStep,
    Work,
)
from shardcore.domain.cost.rank_step import RankCollective, step_on
from shardcore.domain.cost.reasons import CollectiveFacts
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.variable_size import ShardedVariable

AXES = ("data", "model")
SMALL, LARGE = Mesh((2, 2), AXES), Mesh((8, 2), AXES)
KERNEL = ShardedVariable("kernel", (100, 8), ("data", "model"), 4)
BIAS = ShardedVariable("bias", (8,), (None,), 4)
SHARDED, SUMMED = Layout(SMALL, KERNEL.spec), Layout(SMALL, (None, "model"), {"data": "sum"})


VALUES = [TracedMemory(Allocation("variables", 0, 0), stored=each) for each in (KERNEL, BIAS)]


def on_large(*facts, work=(), memory=()):
    started = tuple(TracedCollective(each, time) for time, each in enumerate(facts, 1))
    return step_on(
        LARGE, TracedStep(SMALL, tuple(map(Operators, work)), started, (*VALUES, *memory))
    )


def moved(fact):
    (found,) = on_large(fact).collectives
    return found


def test_an_activation_is_as_large_on_the_large_mesh():
    fact = CollectiveFacts("all_reduce", "forward", ("model",), operand_bytes=640)
    assert moved(fact) == RankCollective("all_reduce", ("model",), 640, waits=True)


def test_a_shard_of_a_weight_is_smaller():
    """100 rows are 50 on each of two ranks, and 13 on the first of eight."""
    fact = CollectiveFacts(
        "all_gather", "forward", ("data",), (), 50 * 4 * 4, shape=KERNEL.shape, source=SHARDED,
        variable="kernel",
    )  # fmt: skip
    assert moved(fact) == RankCollective("all_gather", ("data",), 13 * 4 * 4, waits=False)


def test_a_gradient_is_as_large_before_it_is_scattered():
    fact = CollectiveFacts(
        "reduce_scatter", "backward", ("data",), (), 100 * 4 * 4, shape=KERNEL.shape,
        source=SUMMED, reduced=("kernel",),
    )  # fmt: skip
    assert moved(fact) == RankCollective("reduce_scatter", ("data",), 100 * 4 * 4, waits=False)


def test_a_bucket_has_the_shards_of_its_gradients():
    fact = CollectiveFacts("all_reduce", "backward", ("data",), (), 832, reduced=("kernel", "bias"))
    assert moved(fact).operand_bytes == 13 * 4 * 4 + 32


def test_equal_collectives_are_counted():
    fact = CollectiveFacts("all_reduce", "forward", ("model",), operand_bytes=640)
    (found,) = on_large(fact, fact).collectives
    assert found.times == 2


def test_an_update_and_the_memory_of_variables_shrink_with_the_shards():
    work = (
        Work("aten.mm.default", "float32", 1000, 320, updates=False, times=3),
        Work("aten.add_.Tensor", "float32", 0, 832, updates=True),
    )
    activation = TracedMemory(Allocation("activations", 320, 1))
    step = on_large(work=work, memory=[activation])
    assert [each.bytes for each in step.work] == [320, 208 + 32]
    assert step.work[0].times == 3
    assert dict(step.memory) == {"variables": 208 + 32, "activations": 320}
