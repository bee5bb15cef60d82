"""Each pass over the trace of a step leaves the same numbers: later waits, earlier starts."""

import attrs
import pytest
import torch
import torch.distributed as dist

from shardcore.adapters.capture.analyses import live_bytes
from shardcore.adapters.capture.passes import run_passes
from shardcore.adapters.capture.passes.collectives import (
    with_early_starts,
    with_late_waits,
    with_regathers,
)
from shardcore.adapters.capture.passes.memory import with_operands_reused
from shardcore.adapters.capture.passes.sums import Memories
from shardcore.adapters.capture.trace import Call
from shardcore.adapters.torch_private import collectives
from shardcore.testing import run_ranks
from tests.distributed.passes.recorded_steps import X, on_two_ranks, reduced
from tests.traces import names, recorded, results


def gathered(x):
    return collectives.wait(collectives.all_gather(x, dist.group.WORLD))


def scattered(x):
    return collectives.wait(collectives.reduce_scatter(x, "sum", dist.group.WORLD))


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
        trace = recorded(step, X + rank)
        other = with_late_waits(trace)
        return max(live_bytes(other)) == max(live_bytes(trace)), names(other)

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

    _, after = on_two_ranks(with_room(step), lambda trace: with_early_starts(trace, far))
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
        trace = recorded(step, X + rank)
        other = with_late_waits(with_early_starts(trace))
        starts = [n for n, name in enumerate(names(other)) if name == "all_gather_into_tensor"]
        return max(live_bytes(other)) == max(live_bytes(trace)), starts[1] < names(other).index(
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
        trace = recorded(with_room(step), X)
        other = with_late_waits(with_early_starts(trace))
        found = []
        for each in (with_late_waits(trace), other):
            torch.manual_seed(5)
            found.append(results(each, (X,)))
        return found[0] == found[1], names(trace) == names(other)

    assert run_ranks(program, 2) == [(True, False)] * 2


def test_collectives_and_reads_of_the_host_keep_their_order():
    def look(x):
        """A call without a result: its effect is on the host."""

    def step(x):
        late = torch.sin(torch.cos(x))
        return gathered(late), reduced(x), late

    def program(rank):
        trace = recorded(with_room(step), X)
        place = names(trace).index("all_reduce")
        trace.calls.insert(place, Call(look, (trace.calls[0].result,), {}, None))
        return [
            call.operator.__name__.partition(".")[0]
            for call in with_early_starts(trace).calls
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
        trace = recorded(step, X + rank)
        other = with_regathers(trace)
        runs = (results(with_late_waits(each), (X + rank,)) for each in (other, trace))
        assert next(runs) == next(runs)
        return [names(each).count("all_gather_into_tensor") for each in (trace, other)]

    # One is still there, one no longer what it was, one no longer as it was gathered.
    assert run_ranks(program, 2) == [[4, 5]] * 2


def test_all_passes_together_keep_shared_memory():
    def step(x):
        view = x[0]
        view.mul_(3)
        again = x[0] + 0
        reduced_view = reduced(x)[1]
        reduced_view.add_(again)
        return view, again, reduced_view

    on_two_ranks(step, lambda trace: run_passes(trace, Memories()))


@pytest.mark.parametrize("field", ["calls", "memory", "forms"])
def test_a_pass_does_not_change_its_input_trace(field):
    def program(rank):
        trace = recorded(lambda x: reduced(x) + reduced(x * 2), X)
        before = list(getattr(trace, field))
        run_passes(trace, Memories())
        return (
            before == getattr(trace, field) and attrs.asdict(trace, recurse=False)["refusal"] == ""
        )

    assert all(run_ranks(program, 2))
