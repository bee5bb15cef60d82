"""Calls that repeat an earlier one: dropped where that is the same, and holds no memory."""

import torch

from shardcore.adapters.capture.analyses import live_bytes
from shardcore.adapters.capture.passes.repeats import without_repeated_calls
from shardcore.adapters.capture.trace import Call
from tests.traces import after, names, recorded

X = torch.arange(6.0).reshape(2, 3)
LARGE = torch.arange(20_000.0)  # more than is held for a later call


def once(trace):
    literals = {number: trace.first_values[number] for number in trace.outside}
    return without_repeated_calls(trace, literals)


def left(step, *tensors):
    """The operators of `step` after the pass, which keeps its results."""
    return names(after(step, once, *tensors))


def test_a_mask_that_each_layer_makes_is_made_once():
    def mask(x):
        rows = torch.arange(x.shape[1])
        return torch.where(rows[:, None] >= rows[None], 0.0, torch.tensor(-1e9))

    def step(x):
        for _ in range(3):
            x = x @ mask(x)
        return x

    once_made = [*names(recorded(lambda x: x @ mask(x), X)), "mm", "mm"]
    assert left(step, X) == once_made


def test_numbers_of_other_types_make_other_calls():
    def step(x):
        return torch.stack([(x + n).double() for n in (1, 1.0, True, 0.0, -0.0)]).sum()

    assert left(step, X.long()).count("add") == 5


def test_a_call_after_a_write_into_its_operand_computes_something_else():
    def step(x):
        first = x.exp()
        x.mul_(2)
        return first + x.exp() + x.exp()

    assert left(step, X) == ["exp", "mul_", "exp", "add", "add"]


def test_a_number_in_a_tensor_is_read_again_after_a_write():
    def step(x):
        scale = torch.zeros((), dtype=torch.float64) + x.double().sum()
        first = torch.full((2,), 1.0).mul(scale)
        scale.add_(1)
        return first + torch.full((2,), 1.0).mul(scale)

    assert left(step, X).count("mul") == 2


def test_a_result_that_is_written_in_place_is_not_shared():
    def step(x):
        first, second = x.exp(), x.exp()
        first.add_(1)
        return first + second

    assert left(step, X).count("exp") == 2


def test_two_outputs_never_share_memory():
    assert left(lambda x: (x.exp(), x.exp()), X) == ["exp", "exp"]


def test_random_draws_all_happen():
    trace = recorded(lambda x: x + torch.rand(3) + torch.rand(3), X)
    assert names(once(trace)).count("rand") == 2


def test_views_of_what_steps_write_into_are_made_once():
    def step(x):
        first = x.t() @ x
        x.mul_(2)
        return first + x.t() @ x

    assert left(step, X) == ["t", "mm", "mul_", "mm", "add"]


def test_a_write_through_a_view_that_repeats_another_stays():
    def step(x):
        first, second = x.chunk(3, 1), x.chunk(3, 1)
        second[1].mul_(2)
        return first[1] + second[0]

    assert left(step, X) == ["split", "mul_", "add"]


def test_results_of_several_tensors_are_dropped_together():
    def step(x):
        (a, b), (c, d) = x.max(1), x.max(1)
        return a + c, b + d

    assert left(step, X) == ["max", "add", "add"]


def test_what_is_held_anyway_is_read_again():
    def step(x):
        first = x.exp()
        total = first.sum()
        second = x.exp() + total
        return first.mean() + second.mean()

    assert left(step, LARGE).count("exp") == 1


def test_what_would_have_to_be_held_is_computed_again():
    def step(x):
        total = x.exp().sum()
        return x.exp() * total * x.sin().sum()

    trace = recorded(step, LARGE)
    assert names(once(trace)).count("exp") == 2
    assert max(live_bytes(once(trace))) <= max(live_bytes(trace))


def test_a_result_is_held_until_the_last_use_of_all_that_equal_it():
    def step(x):
        first, second = x.sqrt(), x.sqrt()
        total = first.sum()
        third = x.sqrt() + total
        return second.sum() + third.sum()

    assert left(step, LARGE).count("sqrt") == 1


def test_a_small_view_does_not_hold_a_large_base():
    def step(x):
        total = x.sqrt()[:1].sum()
        return x.sqrt()[:1] * total

    assert left(step, LARGE).count("sqrt") == 2


def test_a_chain_is_dropped_if_its_end_is_held():
    def step(x):
        first = x.sqrt().cos().clone()
        second = x.sqrt().cos().clone() + first.sum()
        return first.mean() + second.mean()

    assert left(step, LARGE).count("cos") == 1


def test_a_backward_pass_recomputes_what_it_recomputed():
    weight = torch.ones(3, requires_grad=True)

    def step(x):
        def block(weight):
            return (x * weight).sin().exp()

        loss = torch.utils.checkpoint.checkpoint(block, weight, use_reentrant=False).sum()
        (gradient,) = torch.autograd.grad(loss, [weight])
        return gradient

    trace = recorded(step, X)
    assert names(trace).count("sin") == 2
    assert names(once(trace)).count("sin") == 2


def test_equal_constants_are_one():
    def step(x):
        return x.pow(torch.tensor(2.0)) + x.pow(torch.tensor(2.0)) * x.pow(torch.tensor(3.0))

    assert left(step, X).count("pow") == 2


def test_a_constant_that_a_run_writes_into_stays_apart():
    def step(x):
        first, second = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0])
        first.add_(x[0])
        return first + second

    after(step, once, X)


def test_a_call_that_returns_its_operand_does_not_make_it():
    trace = recorded(lambda x: x.cos().exp(), X)
    cos, exp = trace.calls
    same = Call(torch.ops.aten.to.dtype, (cos.result, torch.float32), {}, cos.result)
    assert names(once(trace.with_calls([cos, same, same, exp])))[0] == "cos"
