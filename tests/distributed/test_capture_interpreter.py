"""The interpreter gives what fx gives from Python, and leaves the same in memory."""

import operator

import pytest
import torch
from torch import fx

from shardcore.adapters.capture.blocks import Cut, blockwise
from shardcore.adapters.capture.graph import graph_of
from shardcore.adapters.capture.recorder import Recorder
from shardcore.adapters.capture.seeds import generator
from shardcore.adapters.capture.tape import Form
from shardcore.adapters.torch_compat.interpreter import NotInterpretedError, check, interpreted
from shardcore.domain.capture import OtherWay
from tests.distributed.test_capture_memory import highest

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
PLACES = torch.tensor([[1, 3], [0, 2]])


def module_of(step, *operands):
    recorder = Recorder(operands)
    recorder.run(lambda: step(*operands))
    if not isinstance(recorder.tape.outputs, tuple):
        recorder.tape.outputs = (recorder.tape.outputs,)
    return graph_of(recorder.tape, {n: recorder.tape.found[n] for n in recorder.tape.outside})


def both(step, *operands):
    """What `step` gives and leaves in its operands: from Python, and by the interpreter."""
    module = module_of(step, *(each.clone() for each in operands))
    found = []
    for run in (module.forward, interpreted(module)):
        copies = [each.clone() for each in operands]
        found.append([*run(*copies), *copies])
    return found


def lists(x, y):
    sums = torch._foreach_add([x, y], [y, x], alpha=2)
    torch._foreach_mul_([x, y], 3.0)
    torch._foreach_add_([x, y], sums)
    return sums[0] - sums[1]


def parts(x, y):
    first, second = x.split([2, 4])
    values, places = y.topk(2)
    return first, second, values, places, torch.cat([first, second])


def read(x, y):
    return torch.add(x, y, alpha=(y.sum() * 2).abs().round())


def in_place(x, y):
    x.add_(y)
    y.t().mul_(2)
    x[1:3] = y[:2]
    return x.sum(), torch.where(x > 0, x, 0.0)


def of_plain_numbers(x, y):
    return x + True, (x > 0) + True, x * 2, x / 3, 2 - y, y**2, (x > 0) & True, x * float("inf")


STEPS = {
    "lists": lists,
    "parts": parts,
    "a number of a tensor": read,
    "in place": in_place,
    "plain numbers": of_plain_numbers,
    "indices": lambda x, y: (x[:, PLACES], y[PLACES, 1], x[..., 1:4:2]),
    "no dims": lambda x, y: torch.zeros([]) + x.sum() + torch.full([], 2.0),
    "forms": lambda x, y: x[None, None].expand(2, 3, 6, 5).clone(memory_format=torch.channels_last),
    "floats": lambda x, y: torch.nn.functional.interpolate(x[None, None], scale_factor=[2.0, 1.5]),
    "the same list, of sizes and of numbers": lambda x, y: (
        x.new_zeros([2, 2]),
        *torch._foreach_add([x, y], [2, 2]),
        *torch._foreach_mul([x, y], [2, 2.5]),
    ),
    "names": lambda x, y: (
        torch.div(x, y, rounding_mode="floor"),
        torch.nn.functional.gelu(x, approximate="tanh"),
    ),
    "dtypes": lambda x, y: (x.to(torch.bfloat16), y.double(), x.sum(dtype=torch.float64)),
    "complex numbers": lambda x, y: torch.fft.rfft(x) * (1 + 2j),
    "none of them": lambda x, y: torch.nn.functional.layer_norm(x, [5]),
    "classes": lambda x, y: torch.nn.functional.one_hot(PLACES, 4) + 1,
    "bits": lambda x, y: torch.view_copy(x, dtype=torch.int32),
    "nothing": lambda x, y: (),
}


@pytest.mark.parametrize("name", STEPS)
def test_operators_get_what_they_were_given(name):
    found, expected = both(STEPS[name], X, Y)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())


def test_seeds_are_read_from_tensors():
    def step(seed):
        return torch.rand(4, generator=generator(seed))

    for seed in (-7, 2**40 + 3):
        found, expected = both(step, torch.tensor(seed))
        assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize(
    ("recorded", "other"), [(2.5, 2.0), (True, False), (3, 4), (0.1, float("nan")), (1j, 2j)]
)
def test_a_number_that_is_read_is_compared(recorded, other):
    graph = fx.Graph()
    x, into = map(graph.placeholder, ("x", "into"))
    number = torch.tensor(recorded).item()
    graph.call_function(check, (x, number))
    graph.output((graph.call_function(torch.ops.aten.add_.Tensor, (into, 1)),))
    module = fx.GraphModule(torch.nn.Module(), graph)
    for run in (module.forward, interpreted(module)):
        into = torch.zeros(1)
        assert run(torch.tensor(recorded), into)[0].item() == 1
        with pytest.raises(OtherWay):
            run(torch.tensor(other), into)
        assert into.item() == 1


def test_a_generator_of_somebody_s_is_drawn_from():
    drawn_from = torch.Generator().manual_seed(3)
    graph = fx.Graph()
    given = graph.placeholder("given")
    rand = torch.ops.aten.rand.generator
    graph.output((graph.call_function(rand, ([4],), {"generator": given}),))
    run = interpreted(fx.GraphModule(torch.nn.Module(), graph))
    for _ in range(2):
        state = drawn_from.get_state()
        (found,) = run(drawn_from)
        expected = torch.rand(4, generator=torch.Generator().set_state(state))
        assert torch.equal(found, expected)


def test_blocks_are_a_loop():
    graph = fx.Graph()
    x, row, into = map(graph.placeholder, ("x", "row", "into"))
    graph.call_function(torch.ops.aten.mul.out, (x, row), {"out": into})
    graph.output((into,))
    body = fx.GraphModule(torch.nn.Module(), graph)
    run = blockwise(body, Cut(X.shape, 1, 4), [Form.of(X), Form.of(Y[:1])], [Form.of(X)])
    for module in (run.module, around(run)):
        for run_it in (module.forward, interpreted(module)):
            assert torch.equal(run_it(X, Y[:1])[0], X * Y[:1])


def around(function):
    """A graph that calls `function` with its two operands."""
    graph = fx.Graph()
    called = graph.call_function(function, (graph.placeholder("x"), graph.placeholder("row")))
    graph.output((graph.call_function(operator.getitem, (called, 0)),))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_what_ends_is_freed():
    """As fx frees it: after the last call that reads it."""

    def step(x):
        for _ in range(4):
            x = torch.tanh(x @ x.T) @ x
        return x

    x = torch.randn(256, 256)
    module = module_of(step, x)
    run = interpreted(module)
    run(x)
    assert highest(lambda: run(x)) <= highest(lambda: module.forward(x))


def test_the_optimizer_of_torchscript_is_off_for_a_run_alone():
    step = interpreted(module_of(lambda x: x + 1, X))
    fails = interpreted(module_of(lambda x: x @ x.T, X))
    script = torch._C._get_graph_executor_optimize
    step(X)
    assert script()
    with pytest.raises(RuntimeError):
        fails(torch.randn(2, 3, 4, 5))
    assert script()


def test_an_operator_that_fails_says_what_it_says_to_python():
    look_up = interpreted(module_of(torch.nn.functional.embedding, PLACES, X))
    with pytest.raises(
        IndexError, match=r"^index out of range in self \(An operator of a captured"
    ):
        look_up(PLACES + 9, X)
    product = interpreted(module_of(torch.mm, X, Y.T))
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied"):
        product(X, Y)


def test_a_function_of_python_is_not_interpreted():
    def double(x):
        return x * 2

    graph = fx.Graph()
    graph.output((graph.call_function(double, (graph.placeholder("x"),)),))
    with pytest.raises(NotInterpretedError, match="double is a function of Python"):
        interpreted(fx.GraphModule(torch.nn.Module(), graph))


@pytest.fixture(scope="module")
def shifts():
    """Two overloads that the interpreter cannot tell apart."""
    library = torch.library.Library("shardcore_shifts", "DEF")
    for name, sign in (("up", 1), ("down", -1)):
        library.define(f"shift.{name}(Tensor x, int {name}) -> Tensor")
        library.impl(f"shift.{name}", lambda x, by, sign=sign: x + sign * by, "CPU")
    yield torch.ops.shardcore_shifts.shift
    library._destroy()


def test_another_overload_than_the_recorded_one_is_not_taken(shifts):
    refusals = []
    for overload in (shifts.up, shifts.down):
        module = module_of(lambda x, overload=overload: overload(x, 2), X)
        try:
            assert torch.equal(interpreted(module)(X)[0], module.forward(X)[0])
        except NotInterpretedError as refusal:
            refusals.append(str(refusal))
    assert len(refusals) == 1
    assert "the interpreter takes shardcore_shifts::shift" in refusals[0]
