"""Each pass over the tape of a step leaves fewer calls, or other ones, that do the same."""

import attrs
import pytest
import torch
import torch.distributed as dist

from shardcore.adapters.capture.passes import improved
from shardcore.adapters.capture.passes.communication.overlap import (
    with_early_starts,
    with_late_waits,
)
from shardcore.adapters.capture.passes.communication.regather import with_regathers
from shardcore.adapters.capture.passes.communication.sums import Memories, in_buckets
from shardcore.adapters.capture.passes.memory.reuse import with_operands_reused
from shardcore.adapters.capture.tape.analyses import FAR, live_bytes
from shardcore.adapters.capture.tape.tape import Call
from shardcore.adapters.torch_private import collectives
from shardcore.ports.capture import RecordedSum
from shardcore.testing import run_ranks
from tests.tapes import changed, names, recorded, results

X = torch.arange(6.0).reshape(2, 3)


def reduced(x, op="sum"):
    return collectives.wait(collectives.all_reduce(x, op, dist.group.WORLD))


def gathered(x):
    return collectives.wait(collectives.all_gather(x, dist.group.WORLD))


def scattered(x):
    return collectives.wait(collectives.reduce_scatter(x, "sum", dist.group.WORLD))


def on_two_ranks(step, one_pass=lambda tape: tape):
    """The operators of `step` as recorded, and after a pass and waits."""

    def program(rank):
        return changed(step, lambda tape: with_late_waits(one_pass(tape)), X + rank)

    first, second = run_ranks(program, 2)
    assert first == second
    return first


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
    _, after = on_two_ranks(step, lambda tape: in_buckets(tape, most=two_a_bucket))
    assert after.count("all_reduce") == 3


def test_buckets_are_of_one_size_so_that_the_first_leaves_early():
    def step(x):
        return [reduced(x * factor) for factor in range(1, 6)]

    _, after = on_two_ranks(step, lambda tape: in_buckets(tape, most=5 * X.numel() * 4, small=0))
    products = [place for place, name in enumerate(after) if name == "mul"]
    assert after.count("all_reduce") == 2
    assert products[2] < after.index("all_reduce") < products[3]


def test_buckets_are_made_by_the_bytes_that_the_largest_rank_sends():
    """Another rank sends more: its buckets are full earlier, and so are ours."""

    def step(x):
        return [reduced(x * factor) for factor in range(1, 6)]

    def as_large_as_elsewhere(tape):
        return in_buckets(tape, sums=[RecordedSum(X.numel() * 8, 0)] * 5, **limits)

    limits = {"most": 6 * X.numel() * 4, "small": 6 * X.numel() * 4}
    _, own = on_two_ranks(step, lambda tape: in_buckets(tape, **limits))
    _, after = on_two_ranks(step, as_large_as_elsewhere)
    assert (own.count("all_reduce"), after.count("all_reduce")) == (1, 3)


def test_buckets_are_made_by_the_calls_of_the_rank_that_has_most():
    """Another rank has so many calls between two sums that they are apart, and so are ours."""

    def step(x):
        large = reduced(x.repeat(30, 1)) * 3
        return large, reduced(x * 4)

    def as_far_as_elsewhere(tape):
        return in_buckets(tape, sums=[RecordedSum(4, 1), RecordedSum(4, FAR + 2)])

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


def test_a_collective_is_waited_for_when_it_is_needed():
    def step(x):
        total = reduced(x)[0]
        product = x * 2
        return product, total + 1

    before, after = on_two_ranks(step)
    assert before == ["all_reduce", "select", "mul", "add"]
    assert after == ["all_reduce", "select", "mul", "wait_tensor", "add"]


def test_an_operand_is_not_written_before_its_collective_has_finished():
    def step(x):
        mine = x * 2
        total = reduced(mine)
        mine.add_(1)
        return total + mine

    _, after = on_two_ranks(step)
    assert after == ["mul", "all_reduce", "wait_tensor", "add_", "add"]


@pytest.mark.parametrize(("room", "waits"), [(1, 2), (100, 0)])
def test_late_waits_do_not_raise_the_peak_memory(room, waits):
    def step(x):
        parts = [scattered(x * factor)[0] for factor in range(1, 5)]
        return torch.cat(parts), x.repeat(room, 1)

    def program(rank):
        tape = recorded(step, X + rank)
        other = with_late_waits(tape)
        return max(live_bytes(other)) == max(live_bytes(tape)), names(other)

    (is_kept, after), _ = run_ranks(program, 2)
    assert is_kept
    last = max(place for place, name in enumerate(after) if name == "reduce_scatter_tensor")
    assert after[:last].count("wait_tensor") == waits


def with_room(step):
    """`step`, which holds much in the end."""
    return lambda x: (step(x), x.repeat(50, 50))


def test_a_collective_starts_before_operators_that_it_does_not_depend_on():
    def step(x):
        return torch.sin(x), reduced(torch.cos(x))

    before, after = on_two_ranks(with_room(step), with_early_starts)
    assert before[:3] == ["sin", "cos", "all_reduce"]
    assert after[:3] == ["cos", "all_reduce", "sin"]


@pytest.mark.parametrize("far", [1, 4, 8])
def test_one_weight_at_a_time_is_prefetched_while_the_previous_one_is_used(far):
    def step(x):
        return [gathered(x[row]) * 2 for row in (0, 1, 0, 1)]

    _, after = on_two_ranks(with_room(step), lambda tape: with_early_starts(tape, far))
    kinds = {"all_gather_into_tensor": "start", "wait_tensor": "wait", "mul": "mul"}
    in_turn = 4 * ["start", "wait", "mul"]
    ahead = ["start", "wait", *3 * ["start", "mul", "wait"], "mul"]
    assert [kinds[name] for name in after if name in kinds] == (in_turn if far == 1 else ahead)


def test_no_weight_is_prefetched_at_the_peak_of_memory():
    def step(x):
        large, whole = x.repeat(2, 2), gathered(x)
        return large.sum() + whole

    _, after = on_two_ranks(step, with_early_starts)
    assert after.index("repeat") < after.index("all_gather_into_tensor")
    before, after = on_two_ranks(with_room(step), with_early_starts)
    assert before.index("repeat") < before.index("all_gather_into_tensor")
    assert after.index("all_gather_into_tensor") < after.index("repeat")


def test_free_memory_is_spent_on_one_collective_only():
    def step(x):
        return [gathered(x * factor).sum() for factor in range(4)], x.repeat(6, 1)

    def program(rank):
        tape = recorded(step, X + rank)
        other = with_late_waits(with_early_starts(tape))
        starts = [n for n, name in enumerate(names(other)) if name == "all_gather_into_tensor"]
        return max(live_bytes(other)) == max(live_bytes(tape)), starts[1] < names(other).index(
            "sum"
        )

    assert run_ranks(program, 2) == [(True, True)] * 2


def test_an_independent_operator_runs_during_an_all_reduce():
    def step(x):
        aside = torch.sin(x)
        return aside, reduced(torch.tan(reduced(torch.cos(x))))

    _, after = on_two_ranks(with_room(step), with_early_starts)
    assert after[:5] == ["cos", "all_reduce", "sin", "wait_tensor", "tan"]


def test_writes_and_random_draws_keep_their_order():
    def step(x):
        drawn = torch.rand(2, 3)
        view = x[0]
        y = torch.sin(x)
        view.mul_(2)
        total = reduced(x * torch.rand(3))
        x.add_(torch.rand(3))
        return drawn, total, y, gathered(x)

    def program(rank):
        tape = recorded(with_room(step), X)
        other = with_late_waits(with_early_starts(tape))
        found = []
        for each in (with_late_waits(tape), other):
            torch.manual_seed(5)
            found.append(results(each, (X,)))
        return found[0] == found[1], names(tape) == names(other)

    assert run_ranks(program, 2) == [(True, False)] * 2


def test_collectives_and_reads_of_the_host_keep_their_order():
    def look(x):
        """A call without a result: its effect is on the host."""

    def step(x):
        late = torch.sin(torch.cos(x))
        return gathered(late), reduced(x), late

    def program(rank):
        tape = recorded(with_room(step), X)
        place = names(tape).index("all_reduce")
        tape.calls.insert(place, Call(look, (tape.calls[0].result,), {}, None))
        return [
            call.operator.__name__.partition(".")[0]
            for call in with_early_starts(tape).calls
            if call.operator is look or call.operator.namespace == "_c10d_functional"
        ]

    order = ["all_gather_into_tensor", "look", "all_reduce"]
    for found in run_ranks(program, 2):
        assert [name for name in found if name in order] == order


def test_an_all_reduce_reuses_the_memory_of_an_operand_at_its_last_use():
    def step(x):
        mine, read_later = x * 2, x * 3
        flat = x.repeat(2, 1).t()
        totals = [reduced(mine[0]), reduced(x), reduced(read_later), reduced(flat)]
        return totals, read_later + 1

    _, after = on_two_ranks(step, with_operands_reused)
    sums = [name for name in after if name.startswith("all_reduce")]
    assert sums == ["all_reduce_", "all_reduce", "all_reduce", "all_reduce"]


def test_a_weight_is_gathered_again_for_the_backward_pass():
    parts = {name: torch.rand(1, 3) for name in ("first", "last", "written", "scaled")}

    def step(x):
        x = x.detach().requires_grad_()
        written = gathered(parts["written"])
        y = (x * gathered(parts["first"])).sin() * gathered(parts["scaled"]).mul_(2) * written
        written_later = parts["written"].add_(1)
        y = y * torch.cat(gathered(parts["last"]).chunk(2))
        y.sum().backward()
        return x.grad, y.detach(), written_later

    def program(rank):
        tape = recorded(step, X + rank)
        other = with_regathers(tape)
        runs = (results(with_late_waits(each), (X + rank,)) for each in (other, tape))
        assert next(runs) == next(runs)
        return [names(each).count("all_gather_into_tensor") for each in (tape, other)]

    # One is still there, one no longer what it was, one no longer as it was gathered.
    assert run_ranks(program, 2) == [[4, 5]] * 2


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


def test_all_passes_together_keep_shared_memory():
    def step(x):
        view = x[0]
        view.mul_(3)
        again = x[0] + 0
        reduced_view = reduced(x)[1]
        reduced_view.add_(again)
        return view, again, reduced_view

    on_two_ranks(step, lambda tape: improved(tape, Memories()))


@pytest.mark.parametrize("field", ["calls", "memory", "forms"])
def test_a_pass_does_not_change_its_input_tape(field):
    def program(rank):
        tape = recorded(lambda x: reduced(x) + reduced(x * 2), X)
        before = list(getattr(tape, field))
        improved(tape, Memories())
        return before == getattr(tape, field) and attrs.asdict(tape, recurse=False)["refusal"] == ""

    assert all(run_ranks(program, 2))
