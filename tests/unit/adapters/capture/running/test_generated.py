"""The function of a trace gives the results of the step, and changes the same memory."""

import linecache
import re
import traceback
import weakref

import attrs
import pytest
import torch

from shardcore.adapters.capture.passes.checks import check
from shardcore.adapters.capture.recording.recorder import Recorder
from shardcore.adapters.capture.running.generated import function_of
from shardcore.adapters.capture.running.program import TraceCapture
from shardcore.adapters.capture.trace import Call, numbered
from shardcore.domain.capture import GuardFailed
from shardcore.reporting.errors import CAPTURED
from tests.traces import highest

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
PLACES = torch.tensor([[1, 3], [0, 2]])


def trace_of(step, *operands):
    recorder = Recorder(operands)
    recorder.run(lambda: step(*operands))
    return recorder.trace


def generated(trace):
    return function_of(trace, {number: trace.first_values[number] for number in trace.outside})


def lists(x, y):
    sums = torch._foreach_add([x, y], [y, x], alpha=2)
    torch._foreach_mul_([x, y], 3.0)
    torch._foreach_add_([x, y], sums)
    return sums[0] - sums[1]


def parts(x, y):
    first, second = x.split([2, 4])
    values, places = y.topk(2)
    return first, second, values, places, torch.cat([first, second])


def in_place(x, y):
    x.add_(y)
    y.t().mul_(2)
    x[1:3] = y[:2]
    return x.sum(), torch.where(x > 0, x, 0.0)


STEPS = {
    "lists": lists,
    "parts": parts,
    "a number of a tensor": lambda x, y: torch.add(x, y, alpha=(y.sum() * 2).abs().round()),
    "in place": in_place,
    "plain numbers": lambda x, y: (x + True, (x > 0) + True, x * 2, x / 3, 2 - y, x * float("inf")),
    "equal numbers of two types": lambda x, y: (x * 1, x * 1.0, x * True, x.long() * 1),
    "indices": lambda x, y: (x[:, PLACES], y[PLACES, 1], x[..., 1:4:2]),
    "no dims": lambda x, y: torch.zeros([]) + x.sum() + torch.full([], 2.0),
    "forms": lambda x, y: x[None, None].expand(2, 3, 6, 5).clone(memory_format=torch.channels_last),
    "names": lambda x, y: (
        torch.div(x, y, rounding_mode="floor"),
        torch.nn.functional.gelu(x, approximate="tanh"),
    ),
    "dtypes": lambda x, y: (x.to(torch.bfloat16), y.double(), x.sum(dtype=torch.float64)),
    "none of them": lambda x, y: torch.nn.functional.layer_norm(x, [5]),
    "an operand": lambda x, y: (x, y + 1),
    "nothing": lambda x, y: (),
}


@pytest.mark.parametrize("name", STEPS)
def test_operators_get_the_arguments_of_the_recording(name):
    step, first = STEPS[name], [X.clone(), Y.clone()]
    expected = step(*first)
    expected = [*(expected if isinstance(expected, tuple) else (expected,)), *first]
    copies = [X.clone(), Y.clone()]
    found = [*generated(trace_of(step, X.clone(), Y.clone()))(*copies), *copies]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())


def test_seeds_are_read_from_tensors():
    generator = TraceCapture().generator
    for seed in (-7, 2**40 + 3):
        trace = trace_of(lambda seed: torch.rand(4, generator=generator(seed)), torch.tensor(0))
        expected = torch.rand(4, generator=torch.Generator().manual_seed(seed & 0xFFFFFFFF))
        assert torch.equal(generated(trace)(torch.tensor(seed))[0], expected)


@pytest.mark.parametrize(
    ("recorded", "other"), [(2.5, 2.0), (True, False), (3, 4), (0.1, float("nan")), (1j, 2j)]
)
def test_a_number_that_the_step_reads_is_guarded(recorded, other):
    number = torch.tensor(recorded)
    trace = trace_of(lambda x, into: into.add_(1), number, torch.zeros(1))
    trace.calls.insert(0, Call(check, (numbered(0), number.item()), {}, None))
    trace.inputs = [numbered(0), numbered(1)]
    run, into = generated(trace), torch.zeros(1)
    run(number, into)
    with pytest.raises(GuardFailed):
        run(torch.tensor(other), into)
    assert into.item() == 1


def test_a_value_is_freed_after_its_last_use():
    def step(x):
        for _ in range(4):
            x = torch.tanh(x @ x.T) @ x
        return x

    x = torch.randn(256, 256)
    run = generated(trace_of(step, x))
    run(x)
    assert highest(lambda: run(x)) <= highest(lambda: step(x))


def test_a_deleted_function_keeps_no_tensor():
    made = generated(trace_of(lambda x: x + torch.tensor([1.0]), X))
    (literal,) = [each for each in kept_by(made) if isinstance(each, torch.Tensor)]
    gone = weakref.ref(literal)
    del literal, made
    assert gone() is None


def kept_by(run):
    cells = dict(zip(run.__code__.co_freevars, run.__closure__, strict=True))
    return list(cells["generated"].cell_contents.__globals__.values())


def test_an_operator_that_fails_says_where_the_step_called_it():
    look_up = generated(trace_of(torch.nn.functional.embedding, PLACES, X))
    with pytest.raises(IndexError, match="index out of range in self") as failed:
        look_up(PLACES + 9, X)
    (note,) = failed.value.__notes__
    assert note.startswith("In a captured step, where eagerly it is ")
    assert f"{__file__}:" in note


def test_a_debugger_finds_the_lines_of_the_function():
    """Each call has its line of source, and a traceback shows both."""
    x = torch.ones(2, 3)
    run = generated(trace_of(lambda x: x @ torch.ones(3, 2) + 7, x))
    with pytest.raises(RuntimeError) as error:
        run(torch.ones(2, 4))
    *_, frame = traceback.extract_tb(error.tb)
    assert frame.filename.startswith(CAPTURED)
    assert re.match(r"v\d+ = aten_mm_\d+\(v0, v\d+\).*  # .*test_generated\.py:\d+", frame.line)
    text = "".join(linecache.getlines(frame.filename))
    assert re.search(r"aten_add_Tensor_\d+\(v\d+, 7\)", text)


def test_a_trace_is_printed_a_line_for_each_call():
    trace = trace_of(lambda x: torch.sum(x.t(), 1, keepdim=True), torch.ones(2, 3))
    first, *calls = str(trace).splitlines()
    assert first == "inputs [v0], from outside []"
    assert re.match(r"v1 = aten\.t\.default\(v0\)  # float32\[3, 2\]; .*:\d+$", calls[0])
    assert re.match(r"v2 = aten\.sum\.dim_IntList\(v1, \[1\], True\)  # float32\[3, 1\]", calls[1])


def test_the_name_of_a_file_adds_no_line_of_code():
    trace = trace_of(lambda x: x + 1, torch.ones(2))
    odd = attrs.evolve(trace.calls[0], line="a\nraise SystemExit\r.py:1")
    (result,) = generated(trace.with_calls([odd]))(torch.ones(2))
    assert result.tolist() == [2, 2]
