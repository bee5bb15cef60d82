"""Calls that need not run: aliases, unused results, views of views, constants."""

import torch

from shardcore.adapters.capture.generated import function_of
from shardcore.adapters.capture.passes.cleanup import (
    with_direct_views,
    with_plain_ones,
    without_aliases,
    without_dead_code,
)
from tests.tapes import changed, recorded

X = torch.arange(6.0).reshape(2, 3)


def test_an_alias_is_replaced_by_its_tensor():
    def step(x):
        return (x.detach() * 2).detach().add_(1)

    assert changed(step, without_aliases, X) == (
        ["detach", "mul", "detach", "add_"],
        ["mul", "add_"],
    )


def test_a_view_of_the_same_shape_is_replaced_by_its_tensor():
    def step(x):
        with torch._C._AutoDispatchBelowAutograd():  # as where DTensor wraps its part of a result
            return (x * 2).view_as(x) + x.view_as(x)

    assert changed(step, without_aliases, X)[1] == ["mul", "view_as", "add"]


def test_a_constant_that_is_written_into_is_created_in_each_run():
    def step(x):
        return torch.tensor([1.0, 2.0, 3.0]).add_(x[0])

    tape = without_aliases(recorded(step, X))
    module = function_of(tape, {n: tape.found[n] for n in tape.outside})
    assert module(X)[0].tolist() == module(X)[0].tolist()


def test_an_unused_result_is_not_computed():
    def step(x):
        unread = torch.sin(x)
        unread.add_(1)
        torch.rand(2)  # another draw would come out otherwise
        x.mul_(2)
        return x + 1

    before, after = changed(step, without_dead_code, X)
    assert before == ["sin", "add_", "rand", "mul_", "add"]
    assert after == ["rand", "mul_", "add"]


def test_an_unused_view_is_not_made_even_if_its_memory_is_read():
    def step(x):
        x.t().unsqueeze(0)
        x.view(6)[0].add_(1)
        return x + 1

    assert changed(step, without_dead_code, X)[1] == ["view", "select", "add_", "add"]


def test_a_view_of_views_becomes_one_view_of_the_base():
    def step(x):
        turned = x.unsqueeze(0).permute(2, 0, 1).unsqueeze(3).squeeze(1)
        turned.mul_(2)
        same = x.t().unsqueeze(1).squeeze(1).t()
        flat = x.unsqueeze(0).squeeze(0).unsqueeze(1).view(6)
        return turned + 1, same + 2, flat + 3, x.unsqueeze(1).expand(2, 4, 3), x[1].unsqueeze(0).t()

    before, after = changed(step, with_direct_views, X)
    assert len(before) > 20
    assert after == [
        *("as_strided", "mul_", "view", "add", "add", "add"),
        *("as_strided", "select", "as_strided"),
    ]


def test_the_base_of_a_view_may_have_any_strides():
    turned = X.t()
    assert changed(lambda x: x.t().unsqueeze(0) + 1, with_direct_views, turned)[1] == [
        "as_strided",
        "add",
    ]
    square = X.t() @ X
    assert changed(lambda x: x.unsqueeze(0).squeeze(0).t() + x, with_direct_views, square)[1] == [
        "t",
        "add",
    ]


def test_a_backward_pass_starts_from_a_constant_and_not_from_the_loss():
    def step(x):
        return torch.ones_like(x.sum()) * x

    before, after = changed(step, with_plain_ones, X)
    assert before == ["sum", "ones_like", "mul"]
    assert after == ["sum", "ones", "mul"]
