"""Calls that need not run: unused results, views of views, constants."""

import torch

from shardcore.adapters.capture.passes.cleanup import (
    with_constant_loss_seed,
    with_direct_views,
    without_dead_code,
)
from tests.traces import changed

X = torch.arange(6.0).reshape(2, 3)


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

    before, after = changed(step, with_constant_loss_seed, X)
    assert before == ["sum", "ones_like", "mul"]
    assert after == ["sum", "ones", "mul"]
