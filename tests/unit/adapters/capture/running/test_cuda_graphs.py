"""Captured steps that a CUDA graph may replay. That it replays them is tested on a GPU."""

import attrs
import numpy as np
import pytest
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.running import cuda_graphs
from shardcore.adapters.capture.running.cuda_graphs import is_on_gpu, reason_against, replayable
from shardcore.adapters.capture.running.executors import divide
from shardcore.adapters.capture.trace import Call, Number, Trace
from shardcore.domain.errors import EnvironmentProblem
from tests.traces import recorded

X = torch.arange(6.0).reshape(2, 3)
FREE = 10**9
NOTHING = Trace()
GPU = torch.device("cuda")


def on_gpu(step, *tensors):
    """The trace of a step, as if its tensors were on a GPU."""
    trace = recorded(step, *tensors)
    trace.forms[:] = [attrs.evolve(form, device=GPU) for form in trace.forms]
    return trace


def reason(step, *tensors, free=FREE):
    trace = on_gpu(step, *tensors)
    return reason_against(trace, {n: trace.first_values[n] for n in trace.outside}, free)


def test_a_step_of_operators_on_the_gpu_is_replayed():
    assert reason(lambda x: (x @ x.T).relu().sum(), X) == ""


def test_a_step_that_draws_from_torch_s_generator_is_replayed():
    assert reason(torch.nn.functional.dropout, X) == ""


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda x: x[x > 2], "aten.index.Tensor reads values on the host"),
        (lambda x: x.nonzero(), "aten.nonzero.default reads values on the host"),
    ],
)
def test_an_operator_whose_result_has_a_shape_by_values_is_not(step, why):
    found = reason(step, X)
    assert why in found
    assert "test_cuda_graphs.py" in found


def test_results_on_the_host_are_not():
    trace = on_gpu(lambda x: x * 2, X)
    place = trace.calls[0].result.number
    trace.forms[place] = attrs.evolve(trace.forms[place], device=torch.device("cpu"))
    assert "aten.mul.Tensor computes on the host" in reason_against(trace, {}, FREE)


def test_the_random_state_of_attention_may_be_on_the_host():
    trace = on_gpu(lambda x: x * 2, X)
    state = trace.new(attrs.evolve(trace.forms[0], device=torch.device("cpu")))
    attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
    trace.calls.append(Call(attention, (), {}, (state,)))
    assert reason_against(trace, {}, FREE) == ""


def test_an_input_on_the_host_is_not_and_a_constant_is():
    def step(x):
        return x * torch.tensor(2.0)

    trace = on_gpu(step, X)
    (constant,) = trace.outside
    trace.forms[constant] = attrs.evolve(trace.forms[constant], device=torch.device("cpu"))
    assert reason_against(trace, {constant: torch.tensor(2.0)}, FREE) == ""
    assert "it reads a tensor of the host" in reason_against(trace, {}, FREE)


@pytest.mark.parametrize(
    "batch", [X.T, X[:, None], torch.ones(2, 3, 4).transpose(0, 2), torch.ones(())]
)
def test_an_input_of_which_a_copy_has_the_strides_is_replayed(batch):
    assert batch.clone().stride() == batch.stride() or 1 in batch.shape
    assert reason(lambda x: x * 2, batch) == ""


@pytest.mark.parametrize("batch", [X[:, :2], X[:, ::2], torch.ones(2, 1).expand(2, 3)])
def test_an_input_with_gaps_is_not(batch):
    assert batch.clone().stride() != batch.stride()
    trace = on_gpu(lambda x: x * 2, batch)
    (place,) = (each.number for each in trace.inputs)
    trace.forms[place] = attrs.evolve(trace.forms[place], strides=batch.stride())
    assert reason_against(trace, {}, FREE) == "a tensor of its batch has gaps"


def test_a_step_that_overwrites_its_inputs_is_not():
    trace = on_gpu(lambda x: x * 2, X)
    trace.donated = 1
    assert reason_against(trace, {}, FREE) == "it overwrites its inputs"


def test_a_tensor_that_is_transposed_in_place_is_not():
    """A replay would not turn a variable again."""
    assert reason(lambda x: (x * 2).transpose_(0, 1), X) == "a tensor gets another shape in place"


def with_all_reduce():
    trace = on_gpu(lambda x: x * 2, X)
    value = trace.calls[0].result
    reduce = torch.ops._c10d_functional.all_reduce.default
    trace.calls.append(
        Call(reduce, (value, "sum", "0"), {}, trace.new(trace.form(value)), (), "here")
    )
    return trace


def test_a_collective_is_not():
    assert reason_against(with_all_reduce(), {}, FREE) == "it starts collectives: here"


@pytest.mark.parametrize(("by_gloo", "why"), [(True, "over gloo: here"), (False, "")])
def test_a_collective_over_nccl_is_replayed_if_the_user_asks_for_it(monkeypatch, by_gloo, why):
    monkeypatch.setenv("SHARDCORE_CUDA_GRAPHS", "nccl")
    monkeypatch.setattr(torch_private, "runs_on_gloo", lambda group, device: by_gloo)
    expected = why and f"it starts collectives {why}"
    assert reason_against(with_all_reduce(), {}, FREE) == expected


def test_a_number_of_a_tensor_is_multiplied_on_the_gpu_where_it_can_be(monkeypatch):
    """Keras' SGD takes its learning rate so."""
    monkeypatch.setattr(cuda_graphs, "_free_bytes", lambda: FREE)

    def trace(**kwargs):
        found = on_gpu(lambda x, y, rate: torch.add(x, y, alpha=2.0), X, X, torch.tensor(2.0))
        found.calls[0] = attrs.evolve(found.calls[0], **kwargs)
        return found

    rate = trace().inputs[2]
    alike = replayable(NOTHING, trace(kwargs={"alpha": Number(rate)}), {})
    assert [each.operator.__name__ for each in alike.calls] == ["mul.Tensor", "add.Tensor"]
    other = trace(operator=torch.ops.aten.lerp.Scalar, kwargs={"weight": Number(rate)})
    assert replayable(NOTHING, other, {}) is None


def test_a_step_with_much_memory_is_not():
    needed = 3 * X.nbytes  # of the batch and two results
    assert reason(lambda x: x * 2 + 1, X, free=4 * needed) == ""
    found = reason(lambda x: x * 2 + 1, X, free=4 * needed - 1)
    assert found == f"its inputs and results have {needed} bytes, and {4 * needed - 1} are free"
    assert reason(lambda x: (x * 2).view(3, 2), X, free=4 * 2 * X.nbytes) == ""


def test_a_variable_turns_it_off_and_another_value_is_refused(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_free_bytes", lambda: FREE)
    trace = on_gpu(lambda x: x * 2, X)
    assert replayable(NOTHING, trace, {}) is not None
    monkeypatch.setenv("SHARDCORE_CUDA_GRAPHS", "0")
    assert replayable(NOTHING, trace, {}) is None
    monkeypatch.setenv("SHARDCORE_CUDA_GRAPHS", "off")
    with pytest.raises(EnvironmentProblem, match="to be 1, 0 or nccl, got 'off'"):
        replayable(NOTHING, trace, {})


def test_a_step_on_the_cpu_asks_nothing_of_cuda():
    assert not is_on_gpu(recorded(lambda x: x * 2, X), {})
    assert is_on_gpu(on_gpu(lambda x: x * 2, X), {})
    constant = on_gpu(lambda: torch.ones(2) * 2)
    assert not is_on_gpu(constant, {n: constant.found[n] for n in constant.outside})


def test_a_step_of_which_python_runs_the_most_is_not(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_free_bytes", lambda: FREE)
    short, long = on_gpu(lambda x: x * 2, X), on_gpu(lambda x: x * 2 + 1, X)
    assert replayable(short, long, {}) is not None
    assert replayable(long, short, {}) is None


@pytest.mark.parametrize(("device", "ahead"), [("cpu", 1), ("cuda", 0)])
def test_a_copy_from_the_host_comes_before_the_graph(device, ahead):
    """As the state of a SeedGenerator is counted on."""
    trace = on_gpu(lambda x: x + torch.from_numpy(np.arange(3)).to(torch.float32), X)
    (constant,) = trace.outside
    trace.forms[constant] = attrs.evolve(trace.forms[constant], device=torch.device(device))
    before, rest = divide(trace, set(trace.outside))
    assert len(before.calls) == ahead
    assert reason_against(rest, {constant: trace.first_values[constant]}, FREE) == ""
    assert rest.inputs == [*trace.inputs, *before.outputs]
