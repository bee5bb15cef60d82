"""What is divided and taken away is one call, with the bits of three."""

import pytest
import torch

from shardcore.adapters.capture.generated import function_of
from shardcore.adapters.capture.passes.quotients import with_quotients_at_once
from shardcore.adapters.capture.recorder import Recorder
from tests.distributed.tapes import after, names

G = torch.Generator().manual_seed(0)
P, M, D = (torch.randn(33, 31, generator=G) for _ in range(3))
RATE = torch.tensor(0.003)


def update(p, m, d, rate):
    p.add_(m * rate / (d.abs() + 1e-7), alpha=-1)


def taken(step, *tensors):
    return names(after(step, with_quotients_at_once, *tensors))


def test_the_end_of_an_optimizer_is_one_call():
    assert taken(update, P, M, D, RATE) == ["abs", "add", "neg", "addcdiv_"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_has_the_bits_of_three(dtype):
    odd = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-42, -1e-42, 3e38, 1e-30]
    values = torch.tensor(odd + torch.randn(8, generator=G).tolist(), dtype=dtype)
    p, m, d = (
        each.reshape(-1).contiguous() for each in torch.meshgrid([values] * 3, indexing="ij")
    )
    for rate in (0.003, -2.0, 0.0, 1e-40):
        operands = [p.clone(), m, d, torch.tensor(rate, dtype=dtype)]
        recorder = Recorder(operands)
        recorder.run(lambda: update(*operands))  # noqa: B023 - at once
        again = p.clone()
        function_of(with_quotients_at_once(recorder.tape), {})(again, *operands[1:])
        assert torch.equal(again.isnan(), operands[0].isnan())
        assert torch.equal(again.nan_to_num(7.0), operands[0].nan_to_num(7.0))
        is_number = ~again.isnan()
        assert torch.equal(again.signbit()[is_number], operands[0].signbit()[is_number])


def changed_before(p, m, d, rate):
    product = m * rate
    m.mul_(2)
    p.add_(product / d, alpha=-1)


def changed_after(p, m, d, rate):
    quotient = m * rate / d
    d.mul_(2)
    p.add_(quotient, alpha=-1)


def read_elsewhere(p, m, d, rate):
    quotient = m * rate / d
    p.add_(quotient, alpha=-1)
    return quotient


def broadcast(p, m, d, rate):
    p.add_(m * rate / d[0], alpha=-1)


def by_another(p, m, d, rate):
    p.add_(m * d / d, alpha=-1)


def in_half(p, m, d, rate):
    p.bfloat16().add_(m.bfloat16() * rate.bfloat16() / d.bfloat16(), alpha=-1)


def of_itself(p, m, d, rate):
    square = p[:31]
    square.add_(square.t() * rate / d[:31], alpha=-1)


@pytest.mark.parametrize(
    "step",
    [changed_before, changed_after, read_elsewhere, broadcast, by_another, in_half, of_itself],
)
def test_what_is_something_else_stays_what_it_is(step):
    assert "addcdiv_" not in taken(step, P, M, D, RATE)
