"""What is expanded is computed on first and expanded then, and gives the same numbers."""

import pytest
import torch

from shardcore.adapters.capture.passes.broadcasts import with_late_expands
from tests.distributed.tapes import after, names

SUM = torch.randn(1, 1, 5)
ROWS = torch.randn(4, 3, 5)
VIEWS = {"as_strided", "expand", "chunk", "split", "slice", "split_with_sizes", "permute"}


def computed(step, *tensors):
    """The operators that are left, but for views, and how many elements each of them makes."""
    tape = after(step, with_late_expands, *tensors)
    made = [[tape.form(value).elements for value in call.results] for call in tape.calls]
    return [
        (name, *sizes) for name, sizes in zip(names(tape), made, strict=True) if name not in VIEWS
    ]


def test_the_gradient_of_a_mean_is_divided_once():
    def step(gradient, rows):
        return -(gradient.expand(4, 3, 5) / 12.5 * 2) + rows

    assert computed(step, SUM, ROWS) == [("div", 5), ("mul", 5), ("neg", 5), ("add", 60)]


@pytest.mark.parametrize(
    "cut", [lambda x: x.chunk(2), lambda x: x.split([1, 3])], ids=["chunk", "split"]
)
def test_a_rank_s_part_of_it_is_not_copied(cut):
    def step(gradient, rows):
        mine = cut(gradient.expand(4, 3, 5) / 12)[1].clone()
        return mine * rows[-len(mine) :]

    assert [name for name, *_ in computed(step, SUM, ROWS)] == ["div", "mul"]


def test_two_that_are_expanded_alike_are_added_first():
    def step(a, b, rows):
        return (a.expand(4, 3, 5) + b.expand(4, 3, 5)) * rows

    assert computed(step, SUM, SUM * 2, ROWS) == [("add", 5), ("mul", 60)]


def test_one_that_is_expanded_otherwise_is_expanded_first():
    def step(a, b):
        return a.expand(4, 3, 5) + b.expand(4, 3, 5)

    assert computed(step, SUM, torch.randn(4, 3, 1)) == [("add", 60)]


def test_who_must_have_all_elements_gets_them():
    def step(gradient):
        halved = gradient.expand(4, 3, 5) / 2
        return halved.reshape(12, 5) @ torch.ones(5, 2), halved

    assert ("div", 60) in computed(step, SUM)


@pytest.mark.parametrize("turned", [(2, 0, 1), (1, 2, 0)])
def test_a_result_lies_as_it_did(turned):
    def step(gradient, rows):
        halved = gradient.expand(4, 3, 5) / 2
        return halved * rows, rows * halved, halved + rows.exp(), halved.exp()

    rows = torch.randn(4, 3, 5).permute(turned).contiguous()
    back = sorted(range(3), key=turned.__getitem__)
    assert ("div", 60) in computed(step, SUM, rows.permute(back))


def test_what_is_written_into_is_made_as_it_was():
    def step(gradient, rows):
        halved = gradient.expand(4, 3, 5) / 2
        halved[0] += 1
        copy = (gradient.expand(4, 3, 5) / 3).clone()
        copy.mul_(rows)
        return halved * rows, copy

    assert [size for name, size in computed(step, SUM, ROWS) if name == "div"] == [60, 60]


def test_a_copy_has_what_was_there_when_it_was_made():
    def step(gradient, rows):
        copy = gradient.expand(4, 3, 5).clone()
        gradient.zero_()
        return copy * rows

    computed(step, SUM, ROWS)
