"""Steps that Inductor compiles, on real ranks: all-gathers, sums, products."""

import keras
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from shardcore.adapters import torch_private
from shardcore.adapters.capture.passes import run_passes_for_compiler
from shardcore.adapters.capture.passes.collectives import with_late_waits
from shardcore.adapters.capture.passes.inductor import with_reshapes
from shardcore.adapters.capture.recording.recorder import Recorder
from shardcore.adapters.capture.running.generated import graph_of
from shardcore.adapters.torch_private import inductor
from shardcore.testing import run_ranks
from tests.distributed.models import RNG
from tests.distributed.programs import needs_compiler
from tests.distributed.traffic.moved import compiled, distribute, numbers

GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
SUM = torch.ops._c10d_functional.all_reduce.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
STEPS = 5
ROWS = RNG.normal(size=(128, 16)).astype("float32")


def equal_products():
    """Kernels alone: Inductor fuses few operators, and a compiler takes a second for each."""
    dense = [keras.layers.Dense(16, use_bias=False, name=f"dense_{n}") for n in range(4)]
    return keras.Sequential([keras.Input((16,)), *dense])


class Watch(TorchDispatchMode):
    """Notes what runs while gathers and reduce-scatters are under way.

    Attributes:
        gathers: How many gathers were under way at once, at most.
        beside: By operator, how many products each that was started had beside it.
    """

    def __init__(self):
        super().__init__()
        self.gathers, self.beside = 0, {GATHER: [], SCATTER: []}
        self._under_way = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        if operator in self.beside:
            self._under_way[made.data_ptr()] = operator, len(self.beside[operator])
            self.beside[operator].append(0)
            kinds = [kind for kind, _ in self._under_way.values()]
            self.gathers = max(self.gathers, kinds.count(GATHER))
        elif operator is WAIT:
            self._under_way.pop(args[0].data_ptr(), None)
        elif "mm" in operator.name():
            for kind, place in self._under_way.values():
                self.beside[kind][place] += 1
        return made


@needs_compiler
def test_weights_are_gathered_one_at_a_time_and_gradients_sent_while_the_step_computes():
    by_torch, noted = inductor.compile_graph, Watch()

    def watched(graph, examples):
        run = by_torch(graph, examples)

        def run_watched(*operands):
            with noted:
                return run(*operands)

        return run_watched

    def trained(jit_compile):
        keras.utils.clear_session(free_memory=False)
        distribute(equal_products, mesh=(2, 1), policy="fully_sharded", small=0)
        model = compiled(equal_products, jit_compile=jit_compile)
        logs = [model.train_on_batch(ROWS, ROWS, return_dict=True) for _ in range(STEPS)][-1]
        return numbers(model, logs)

    def program(rank):
        inductor.compile_graph = watched
        return trained(False), trained(True), noted.gathers, *noted.beside.values()

    for eager, found, gathers, gathered, scattered in run_ranks(program, 2, timeout=300):
        for name, one in eager.items():
            np.testing.assert_allclose(found[name], one, rtol=1e-5, atol=1e-6, err_msg=name)
        assert gathers == 1
        half = len(gathered) // 2  # of all steps, among them a backward pass
        assert sum(gathered[half:]) >= 5
        # The first is waited for where the step holds most: nothing is held beyond that.
        assert min(scattered[1 : len(scattered) // 4]) > 0


@needs_compiler
def test_a_gather_starts_when_that_before_was_waited_for_wherever_inductor_puts_it():
    def program(rank):
        shards = [torch.full((64, 64), float(rank + n)) for n in (1, 3)]
        graph = fx.symbolic_trace(lambda a, b: step(a, b, dist.group.WORLD.group_name))
        run, noted = inductor.compile_graph(graph, shards), Watch()
        with noted:
            (found,) = run(*shards)
        first, last = (torch.cat([shard - rank, shard - rank + 1]) for shard in shards)
        torch.testing.assert_close(found, first.T @ last)
        return noted.gathers, len(noted.beside[GATHER])

    def step(a, b, group):
        first, last = GATHER(a, 2, group), GATHER(b, 2, group)
        return (WAIT(first).T @ WAIT(last),)

    assert run_ranks(program, 2, timeout=300) == [(1, 2)] * 2


@needs_compiler
def test_a_stacked_tensor_is_not_overwritten_in_place():
    """Else `gate`, written into the last part of the stack, is lost when `back` is laid there."""

    def step(x, kernel):
        first = torch.tanh(x @ kernel)
        second = torch.tanh(first @ kernel)
        third = torch.tanh(second @ kernel)
        mean = torch.stack([first, second, third]).permute(1, 0, 2).flip([1]).mean(1)
        gradient = mean @ kernel
        gate = gradient / 3 * (1 - third * third)
        back = torch.flip(gradient.unsqueeze(1).expand(4, 3, 2) / 3, [1]).permute(1, 0, 2)
        return gate.t() @ second, (back[1] + gate @ kernel.t()) * (1 - second * second)

    def program(rank):
        torch.manual_seed(0)
        operands = torch.randn(4, 2), torch.randn(2, 2)
        found = inductor.compile_graph(fx.symbolic_trace(step), operands)(*operands)
        torch.testing.assert_close(tuple(found), step(*operands))

    run_ranks(program, 1, timeout=300)


def lying_last(*shape):
    return torch.randn(shape).to(memory_format=torch.channels_last)


REWRITTEN = {
    "what is repeated": (
        lambda x, _: x.repeat_interleave(torch.full((3,), 2), dim=0) + 1,
        (torch.randn(3, 4), torch.ones(1)),
    ),
    "a stack of one, viewed": (
        lambda x, _: torch.stack([x.mT * 2])[0].view(3, 20) + 1,
        (torch.randn(3, 5, 4), torch.ones(1)),
    ),
    "a product times a number, added": (
        lambda x, y: torch.add(x, x @ y, alpha=0.5) + (x * y).add_(y @ x, alpha=-2),
        (torch.randn(3, 3), torch.randn(3, 3)),
    ),
    "a product, to which a number times another is added": (
        lambda x, y: torch.add(x @ y, y, alpha=3),
        (torch.randn(3, 3), torch.randn(3, 3)),
    ),
    "a sum of two dtypes": (
        lambda x, y: torch.add(x, y, alpha=0.5),
        (torch.full((1,), -8388608.0, dtype=torch.float64), torch.tensor([16777217])),
    ),
    "the gradient of a padding": (
        lambda x, g: torch.ops.aten.replication_pad2d_backward(g, x * 2, [0, 1, 0, 1]) + 1,
        (lying_last(2, 3, 4, 4), lying_last(2, 3, 5, 5)),
    ),
}


@needs_compiler
@pytest.mark.parametrize("which", REWRITTEN)
def test_operators_that_inductor_miscompiles_are_rewritten_and_compiled(which):
    step, operands = REWRITTEN[which]

    def program(rank):
        recorder = Recorder(operands)
        expected = recorder.run(lambda: step(*operands))
        trace = run_passes_for_compiler(recorder.trace, torch_private.OneDnn())
        run = inductor.compile_graph(graph_of(trace, {}), operands)
        torch.testing.assert_close(run(*operands)[0], expected)

    run_ranks(program, 1, timeout=300)


def test_the_result_of_a_collective_is_not_reshaped_before_its_wait():
    def program(rank):
        x = torch.ones(4, 8)

        def step():
            summed = SUM(x.view(32), "sum", dist.group.WORLD.group_name)
            rows = summed.view(8, 4)
            WAIT(summed)
            return rows + 1

        recorder = Recorder([x])
        recorder.run(step)
        named = [
            call.operator.name() for call in with_reshapes(with_late_waits(recorder.trace)).calls
        ]
        return [name for name in named if name in ("aten::view", "aten::reshape")]

    assert run_ranks(program, 2, timeout=60) == [["aten::reshape", "aten::view"]] * 2
