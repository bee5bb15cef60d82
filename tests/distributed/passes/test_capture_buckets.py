"""Passes that send several sums together leave fewer collectives."""

import pytest
import torch

from shardcore.adapters.capture.analyses import FAR
from shardcore.adapters.capture.passes.sums import in_buckets
from shardcore.ports.capture import RecordedSum
from tests.distributed.passes.recorded_steps import X, on_two_ranks, reduced


def test_all_reduces_are_done_together_until_one_is_needed():
    def step(x):
        one, other = reduced(x), reduced(x[0] * 3)
        third = reduced(one + 1)
        return one, other, third, reduced(x, "max")

    before, after = on_two_ranks(step, in_buckets)
    assert before.count("all_reduce") == 4
    assert after.count("all_reduce") == 3
    assert after.index("wait_tensor") < after.index("add")


def test_a_full_bucket_is_sent():
    def step(x):
        return [reduced(x * factor) for factor in range(1, 6)]

    two_a_bucket = 2 * X.numel() * 4
    _, after = on_two_ranks(step, lambda trace: in_buckets(trace, most=two_a_bucket))
    assert after.count("all_reduce") == 3


def test_buckets_are_of_one_size_so_that_the_first_leaves_early():
    def step(x):
        return [reduced(x * factor) for factor in range(1, 6)]

    _, after = on_two_ranks(step, lambda trace: in_buckets(trace, most=5 * X.numel() * 4, small=0))
    products = [place for place, name in enumerate(after) if name == "mul"]
    assert after.count("all_reduce") == 2
    assert products[2] < after.index("all_reduce") < products[3]


def test_buckets_are_made_by_the_bytes_that_the_largest_rank_sends():
    """Another rank sends more: its buckets are full earlier, and so are ours."""

    def step(x):
        return [reduced(x * factor) for factor in range(1, 6)]

    def as_large_as_elsewhere(trace):
        return in_buckets(trace, sums=[RecordedSum(X.numel() * 8, 0)] * 5, **limits)

    limits = {"most": 6 * X.numel() * 4, "small": 6 * X.numel() * 4}
    _, own = on_two_ranks(step, lambda trace: in_buckets(trace, **limits))
    _, after = on_two_ranks(step, as_large_as_elsewhere)
    assert (own.count("all_reduce"), after.count("all_reduce")) == (1, 3)


def test_buckets_are_made_by_the_calls_of_the_rank_that_has_most():
    """Another rank has so many calls between two sums that they are apart, and so are ours."""

    def step(x):
        large = reduced(x.repeat(30, 1)) * 3
        return large, reduced(x * 4)

    def as_far_as_elsewhere(trace):
        return in_buckets(trace, sums=[RecordedSum(4, 1), RecordedSum(4, FAR + 2)])

    _, own = on_two_ranks(step, in_buckets)
    _, after = on_two_ranks(step, as_far_as_elsewhere)
    assert (own.count("all_reduce"), after.count("all_reduce")) == (1, 2)


def test_a_bucket_is_sent_before_its_operand_is_overwritten():
    def step(x):
        one, other = reduced(x), reduced(x * 2)
        x.add_(1)
        return one, other

    _, after = on_two_ranks(step, in_buckets)
    assert after.count("all_reduce") == 1
    assert after.index("all_reduce") < after.index("add_")


def test_a_bucket_is_sent_at_the_place_of_its_last_sum():
    def step(x):
        one, other = reduced(x), reduced(x * 2)
        return torch.sin(x), one + other

    _, after = on_two_ranks(step, in_buckets)
    assert after.index("all_reduce") < after.index("sin") < after.index("add")


def test_a_small_sum_waits_for_later_ones_with_all_that_is_small_and_needs_it():
    def step(x):
        loss = reduced(x.mean()) / 2
        big = (x.repeat(20, 2) * 2).sum()
        for _ in range(FAR):
            big = torch.sin(big)
        count = reduced(x.sum() + big)
        return loss, loss / count, big

    before, after = on_two_ranks(step, in_buckets)
    assert (before.count("all_reduce"), after.count("all_reduce")) == (2, 1)
    assert after.index("mul") < after.index("all_reduce")


@pytest.mark.parametrize(("calls", "buckets"), [(FAR // 2, 1), (FAR + 1, 2)])
def test_what_is_large_waits_for_later_sums_over_few_calls(calls, buckets):
    def step(x):
        large, other = x.repeat(20, 2) * reduced(x.mean()), x
        for _ in range(calls):
            other = torch.sin(other)
        return large, reduced(other)

    _, after = on_two_ranks(step, in_buckets)
    assert after.count("all_reduce") == buckets


def test_no_two_buckets_wait_for_each_other():
    def step(x):
        first, other = reduced(x), reduced(x, "max")
        return reduced(other + 1), reduced(first + 1, "max")

    _, after = on_two_ranks(step, in_buckets)
    assert after.count("all_reduce") == 3
