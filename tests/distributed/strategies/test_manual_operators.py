"""Strategy `manual`: views, writes and composite operators give what one device gives."""

import numpy as np
import pytest
import torch

import shardcore
from shardcore.domain.errors import ShardedTensorError
from shardcore.testing import run_ranks
from tests.distributed.strategies.manual import ROWS, distribute
from tests.fallbacks import fallbacks, forget_fallbacks


def rows_and_columns(x):
    row, rest = x[0], x[1:].view(-1)
    x.add_(1)
    row.mul_(10)
    rest[4] = 100.0
    return x, row, rest


def lists_of_views(x):
    row, column = x[0], x[:, 1]
    torch._foreach_add_([row[1:], x, column], [1.0, 2.0, 3.0])
    torch._foreach_mul_([row, column], [column[:3], torch.tensor(2.0)])
    return x, row, column


def out_into_a_view(x):
    torch.add(x[0], 1.0, out=x[0])
    return (x,)


def detached_from_a_pending_sum(x):
    total = x.sum(0)
    alias, some = total.detach(), total[1:]
    total.mul_(2)
    some.detach().add_(1)
    return total, alias, some


def while_inferring(x):
    with torch.inference_mode():
        doubled = x * 2
        row = doubled[1]
        doubled[0] = 7.0
        row.view(1, 3)[0].mul_(2)
    return doubled, row


WRITES = [
    rows_and_columns,
    lists_of_views,
    out_into_a_view,
    detached_from_a_pending_sum,
    while_inferring,
]


def test_views_of_a_sharded_dim_are_written_and_read_as_on_one_device():
    values = np.arange(12.0, dtype="float32").reshape(4, 3)

    def program(rank):
        distribute((2, 1), {})
        x = torch.tensor(values)
        return {
            write.__name__: [
                each.numpy() for each in write(shardcore.distribute_tensor(x, ("data", None)))
            ]
            for write in WRITES
        }

    for found in run_ranks(program, 2):
        for write in WRITES:
            expected = [each.numpy() for each in write(torch.tensor(values))]
            for one, other in zip(found[write.__name__], expected, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=write.__name__)


def test_the_gradient_of_a_parameter_that_keras_does_not_know_is_clipped_in_place():
    """It arrives as a view of a partial sum."""

    def gradient(x, scale):
        (x * scale + 1).sum().backward()
        torch.nn.utils.clip_grad_norm_([scale], 0.5, foreach=False)
        return scale.grad

    def program(rank):
        distribute((2, 1), {})
        x = shardcore.distribute_tensor(torch.tensor(ROWS), ("data", None))
        return gradient(x, torch.nn.Parameter(torch.ones(6))).numpy()

    expected = gradient(torch.tensor(ROWS), torch.nn.Parameter(torch.ones(6))).numpy()
    for found in run_ranks(program, 2):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_composite_operator_is_sharded_in_inference_mode():
    """It arrives there as it is, and not as what it is made of."""

    def inferred(x):
        with torch.inference_mode():
            hidden = torch.nn.functional.linear(x, torch.ones(4, 6), torch.arange(4.0))
            return torch.nn.functional.layer_norm(hidden, (4,)).to(torch.float64)

    def program(rank):
        distribute((2, 1), {})
        forget_fallbacks()
        found = inferred(shardcore.distribute_tensor(torch.tensor(ROWS), ("data", None)))
        return found.numpy(), dict(fallbacks())

    expected = inferred(torch.tensor(ROWS)).numpy()
    for found, fell_back in run_ranks(program, 2):
        assert fell_back == {}
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_out_of_another_shape_is_refused():
    def program(rank):
        distribute((2, 1), {})
        x = shardcore.distribute_tensor(torch.tensor(ROWS), ("data", None))
        with pytest.raises(
            ShardedTensorError, match=r"\(6,\) into a sharded tensor of shape \(0, 6\)"
        ):
            torch.add(x[0], 1.0, out=torch.zeros_like(x[:0]))
        y = torch.zeros_like(x)
        return torch.add(x, 1.0, out=y) is y, y.numpy() - ROWS

    for same, difference in run_ranks(program, 2):
        assert same
        np.testing.assert_allclose(difference, 1.0, atol=1e-6)
