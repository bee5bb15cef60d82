"""Calls that depend on constants alone run once, when a program is made."""

import torch

from shardcore.adapters.capture.passes.constants import SMALL_BYTES, with_constants
from tests.traces import after, names, recorded

X = torch.arange(6.0).reshape(2, 3)


def computed_once(trace):
    return with_constants(trace, {number: trace.first_values[number] for number in trace.outside})


def test_a_table_of_positions_is_no_call_of_a_run():
    def step(x):
        angles = torch.arange(3.0).unsqueeze(0) * torch.tensor(0.5)
        return x * angles.cos() + torch.stack([angles, angles], 1).sum((0, 1)) + x.sum()

    trace = after(step, computed_once, X)
    assert names(trace) == ["mul", "add", "sum", "add"]
    assert sorted(map(tuple, (tensor.shape for tensor in trace.buffers.values()))) == [(1, 3), (3,)]


def test_results_of_several_tensors_are_computed():
    def step(x):
        values, indices = torch.tensor([1.0, 3.0, 2.0]).sort()
        return x * values + indices

    assert names(after(step, computed_once, X)) == ["mul", "add"]


def test_a_number_in_a_constant_is_read():
    def step(x):
        return x + torch.ones(3).mul(torch.tensor(2.0, dtype=torch.float64))

    assert names(after(step, computed_once, X)) == ["add"]


def test_what_is_large_is_computed_in_each_run():
    rows = SMALL_BYTES // 4 + 1
    trace = after(lambda x: x.sum() + torch.arange(float(rows)).cos().sum(), computed_once, X)
    assert names(trace) == ["sum", "arange", "cos", "sum", "add"]
    assert trace.buffers == {}


def test_what_a_run_writes_into_is_made_anew_in_each_run():
    def step(x):
        table = torch.zeros(3)
        view = table[:2]
        view.add_(x[0, :2])
        other = torch.tensor([1.0, 2.0, 3.0])
        other.mul_(2)
        return x + table + other.cos()

    def both(trace):
        assert "cos" in names(computed_once(trace))
        return computed_once(trace)

    assert names(after(step, both, X))[:2] == ["zeros", "slice"]


def test_random_draws_and_outputs_stay():
    trace = recorded(lambda x: (x + torch.rand(3), torch.arange(3.0).cos()), X)
    assert names(computed_once(trace)) == ["rand", "add", "cos"]


def test_a_tensor_of_the_batch_or_from_outside_is_no_constant():
    weight = torch.ones(3)
    assert names(recorded(lambda x: x.cos() * weight.sin(), X)) == ["cos", "sin", "mul"]
    trace = recorded(lambda x: x.cos() * weight.sin(), X)
    assert names(with_constants(trace, {})) == ["cos", "sin", "mul"]
