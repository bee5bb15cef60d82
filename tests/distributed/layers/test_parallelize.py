"""`shardcore.parallelize`: plain torch modules, laid out by rules, against one device."""

import re
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import torch
from torch import nn

import shardcore
from shardcore.binding.training.loops import COMPARED
from shardcore.domain.errors import ArgumentProblem, CallProblem, LayoutError, MeshError, RuleError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.layers.torch_zoo import MEGATRON, ROWS, Text, mlp, wrapped
from tests.distributed.programs import STRATEGY, assert_close, distribute, placements


def hand_loop(module, x):
    """Four steps of torch's own: the losses, the state, and what the last moves, without checks."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05, eps=1e-2)
    losses = []
    for _ in range(COMPARED + 1):
        optimizer.zero_grad()
        with count_collectives() as traffic:
            loss = (module(x) ** 2).mean()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    whole = {n: keras.ops.convert_to_numpy(t) for n, t in module.state_dict().items()}
    return whole | {"losses": np.array(losses)}, dict(traffic.calls)


def pair():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


@pytest.mark.parametrize(("inputs_are_trained", "reductions"), [(False, 1), (True, 2)])
def test_a_megatron_pair_is_one_device_with_one_reduction_each_way(inputs_are_trained, reductions):
    rules = [("0.weight", ("model", None)), ("0.bias", ("model",)), ("2.weight", (None, "model"))]

    def program(rank):
        one_device, _ = trained_by_hand(0)
        mesh = distribute((1, 2), {}).device_mesh
        return one_device, *trained_by_hand(
            rank, mesh
        )  # ranks that drew other values take rank 0's

    def trained_by_hand(seed, mesh=None):
        torch.manual_seed(seed)
        module = pair()
        x = torch.as_tensor(ROWS).clone().requires_grad_(inputs_are_trained)
        if mesh:
            shardcore.parallelize_torch_module(module, mesh, rules)
            placed = [placements(parameter) for parameter in module.parameters()]
            assert placed == ["R S(0)", "R S(0)", "R S(1)", "R R"]
        results, calls = hand_loop(module, x)
        return results | ({"gradient": x.grad.numpy()} if inputs_are_trained else {}), calls

    for one_device, results, calls in run_ranks(program, 2):
        assert_close([results], one_device)
        assert calls == {"all_reduce": reductions}


def test_rules_reach_outputs_and_a_batch_that_is_sharded():
    def program(rank):
        torch.manual_seed(1)
        one_device, _ = hand_loop(mlp(), torch.as_tensor(ROWS))
        rules = keras.distribution.LayoutMap(distribute((2, 2), {}).device_mesh)
        for key, spec in {**MEGATRON, "1.output": ("data", None)}.items():
            rules[key] = spec
        torch.manual_seed(1)
        mesh = Mesh((2, 2), ("data", "model"))
        module = shardcore.parallelize_torch_module(mlp(), mesh, rules)
        seen = []
        module[2].register_forward_pre_hook(lambda _, args: seen.append(placements(args[0])))
        x = shardcore.ensure_dtensor_input(ROWS)
        results, _ = hand_loop(module, x)
        module(x.requires_grad_() * 2).sum().backward()
        return one_device, results, seen, placements(x.grad)

    for one_device, results, seen, gradient in run_ranks(program, 4):
        assert_close([results], one_device)
        assert seen == ["S(0) R"] * (COMPARED + 2)
        assert gradient == "S(0) R"  # no sum is left pending before the module either


def test_a_module_that_cannot_be_parallelized_is_refused_by_name():
    def program(rank):
        parallelize = shardcore.parallelize_torch_module
        shardcore.install(STRATEGY)
        with pytest.raises(CallProblem, match="No distribution is set"):
            parallelize(mlp(), Mesh((1, 2), ("data", "model")), {})
        mesh = distribute((1, 2), {}).device_mesh
        with pytest.raises(ArgumentProblem, match=r"a torch\.nn\.Module for .*, got function"):
            parallelize(mlp, mesh, {})
        with pytest.raises(MeshError, match="the distribution that is set is over"):
            parallelize(mlp(), Mesh((2, 1), ("data", "model")), {})
        with pytest.raises(RuleError, match=r"'0\.wight' matches no parameter.*'0\.weight'"):
            parallelize(mlp(), mesh, {"0.wight": ("model", None)})
        with pytest.raises(RuleError, match=r"'0\.weight' matches multiple"):
            parallelize(mlp(), mesh, {r"0\.w.*": ("model", None), r"0\..*t": (None, "model")})
        with pytest.raises(LayoutError, match=r"Rule '0\.bias'.*shape \(8,\)"):
            parallelize(mlp(), mesh, {"0.bias": ("model", None)})
        with pytest.raises(LayoutError, match=r"Rule '0\.bias': .*nowhere"):
            parallelize(mlp(), mesh, {"0.bias": ("nowhere",)})
        tied = Text()
        twice = {"table.weight": ("model", None), "logits.weight": (None, None)}
        with pytest.raises(RuleError, match=r"'table\.weight', 'logits\.weight'.*keep one"):
            parallelize(tied, mesh, twice)
        assert placements(tied.table.weight) == "plain"  # nothing is done by halves
        laid_out = parallelize(mlp(), mesh, MEGATRON)
        with pytest.raises(ArgumentProblem, match=r"'0\.weight' is already laid out"):
            parallelize(laid_out, mesh, MEGATRON)
        with warnings.catch_warnings(action="ignore"):  # torch's, that TorchScript is old
            script = torch.jit.script(mlp())
        with pytest.raises(ArgumentProblem, match=r"'0\.weight' of .* cannot be laid out"):
            wrapped(script)
        distribute((1, 2), {"mlp/0/weight": (None, "model")})
        with pytest.raises(LayoutError, match=r"Rule 'mlp/0/weight' of the layout map"):
            wrapped(laid_out)

    run_ranks(program, 2)


def test_the_code_of_the_document_runs():
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "torch-modules.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)

    def program(rank):
        names = {}
        exec("\n".join(blocks), names)
        return [placements(parameter) for parameter in names["module"].parameters()]

    assert run_ranks(program, 2)[0] == ["R S(0)", "R S(0)", "R S(1)", "R R"]
