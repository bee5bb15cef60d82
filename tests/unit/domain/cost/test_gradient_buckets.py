"""The buckets of gradients that a trace has reduced one by one, and their memory, by hand."""

from shardcore.domain.cost.events import TICK, Allocation, TracedCollective, TracedMemory
from shardcore.domain.cost.gradients import GradientSum, bucket_events, fill_buckets
from shardcore.domain.cost.reasons import CollectiveFacts

END_OF_PASS = 50 * TICK


def sum_of(path, size, number, axes=("data",), dtype="float32"):
    """Returns the sum of the gradient that comes as number `number`."""
    begins = [
        number * TICK,
        *(END_OF_PASS + (10 * at + number) * TICK for at in range(1, len(axes))),
    ]
    ends = [*begins[1:], None]
    started = tuple(
        TracedCollective(
            CollectiveFacts("all_reduce", axes=(axis,), operand_bytes=size, reduced=(path,)),
            begin,
            dtype=dtype,
        )
        for axis, begin in zip(axes, begins, strict=True)
    )
    held = tuple(
        TracedMemory(Allocation("collectives" if end else "gradients", size, begin + TICK, end))
        for begin, end in zip(begins, ends, strict=True)
    )
    return GradientSum(path, started, held)


def test_a_full_bucket_is_sent_when_its_last_gradient_comes():
    sums = [sum_of("a", 60, 1), sum_of("b", 50, 2), sum_of("c", 30, 3)]
    found = bucket_events(fill_buckets(sums, size=100), END_OF_PASS)
    assert [(each.facts.reduced, each.time) for each in found.collectives] == [
        (("a", "b"), 2 * TICK),
        (("c",), END_OF_PASS + 4),
    ]
    (joined,) = found.operators
    assert (joined.work.operator, joined.work.bytes) == ("aten.cat.default", 2 * 110)
    assert found.memory == (
        Allocation("activations", 110, 2 * TICK + 1, 2 * TICK + 3),
        Allocation("gradients", 110, 2 * TICK + 2),
        Allocation("gradients", 30, END_OF_PASS + 6),
    )


def test_gradients_of_other_dtypes_and_axes_are_in_other_buckets():
    other, both = sum_of("b", 60, 2, dtype="bfloat16"), sum_of("c", 60, 3, ("data", "seq"))
    sums = [sum_of("a", 60, 1), other, both]
    assert [[each.path for each in bucket.sums] for bucket in fill_buckets(sums, 100)] == [
        ["a"], ["b"], ["c"]
    ]  # fmt: skip


def test_a_second_axis_is_reduced_at_the_end_while_the_first_sum_is_held():
    sums = [sum_of(path, 60, number, ("data", "seq")) for number, path in enumerate("abc", 1)]
    found = bucket_events(fill_buckets(sums, size=100), END_OF_PASS)
    first, second = (END_OF_PASS + n * TICK for n in (11, 12))
    assert [each.facts.axes for each in found.collectives] == [("data",), ("seq",)] * 2
    assert found.memory[1:3] == (
        Allocation("collectives", 120, 2 * TICK + 2, first + 3),
        Allocation("gradients", 120, first + 2),
    )
    assert found.memory[4] == Allocation("gradients", 60, second + 2)
