"""The search of a layout: the parts of layers, what is sharded, and how often a model is built."""

import multiprocessing
from collections import Counter

import attrs
import keras
import numpy as np
import pytest

import shardcore
from shardcore.adapters.ranks.job import devices
from shardcore.binding.cost.plan import facts_of
from shardcore.bootstrap.cost import auto, machines, search
from shardcore.bootstrap.cost.repeats import Repeats, trace_steps
from shardcore.bootstrap.cost.traces import TraceRequest
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies.candidates import Candidate
from shardcore.policies.regions import layer_groups
from shardcore.reporting.cost import ranking
from shardcore.testing import run_ranks
from tests.distributed.planning.traced_models import (
    BATCHES,
    ROWS,
    counted,
    mlp,
    moved_in,
    norms,
    tokens,
)


@pytest.mark.parametrize("policy", ["fully_sharded", "tensor_parallel"])
def test_the_parts_of_the_layers_make_up_the_step(policy):
    facts, machine = facts_of(mlp, None), machines.find("a100")
    repeats, mesh = Repeats.of(facts), Mesh((1, 2, 2), ("replica", "shard", "model"))
    candidate = Candidate("per_layer", mesh, 2, {"otherwise": policy})
    planned = search.plan_candidate(candidate, ROWS, machine, facts)
    groups = {path: group[0] for group in layer_groups(facts) for path in group}
    asked = TraceRequest(mlp, BATCHES[mlp], ROWS, groups)
    ((step,),) = trace_steps([[planned]], asked, machine, repeats)
    without = attrs.evolve(asked, groups={})
    ((same,),) = trace_steps([[planned]], without, machine, repeats)
    assert (set(step.work), set(step.collectives)) == (set(same.work), set(same.collectives))
    assert step.memory == same.memory
    assert step.layers.keys() == {"pair_0", ""}
    for name in ("flops", "bytes"):
        total, rest, of_blocks = (
            sum(each.times * getattr(each, name) for each in part.work)
            for part in (step, step.layers[""], step.layers["pair_0"])
        )
        assert rest + of_blocks == total
        assert rest < total / 20  # the batch, and the loss
    moved, rest, of_blocks = (
        moved_in(each)[1] for each in (step, step.layers[""], step.layers["pair_0"])
    )
    assert moved == dict(Counter(rest) + Counter(of_blocks))
    assert not rest or max(rest.values()) < 100  # the sum of the loss


def test_as_many_layers_are_sharded_as_the_memory_asks_for():
    options = {"batch": BATCHES[norms], "machine": "a100"}
    sharded = {}
    for memory in ("17MiB", "15.5MiB"):
        plan = shardcore.plan(norms, devices=2, policy="auto", memory=memory, **options)
        found = {each.policy: each for each in plan.ranking.priced}
        best, every = found["per_layer"], found["fully_sharded"]
        assert best.cost.seconds < every.cost.seconds
        assert "data_parallel" not in found  # which needs 18 MiB
        assert best.options["otherwise"] == "data_parallel"
        sharded[memory] = best.options["layers"]
        assert "fully_sharded in first" in str(plan.ranking)
    assert [len(each) for each in sharded.values()] == [1, 2]
    wanted = Candidate("per_layer", best.mesh, 2, best.options)
    planned = search.plan_candidate(wanted, ROWS, machines.find("a100"), facts_of(norms, None))
    asked = TraceRequest(norms, BATCHES[norms], ROWS)
    repeats = Repeats.of(facts_of(norms, None))
    ((step,),) = trace_steps([[planned]], asked, machines.find("a100"), repeats)
    for found in run_ranks(counted, 2, norms, [wanted]):
        assert found == [(wanted, *moved_in(step))]


def test_a_layout_of_the_table_has_the_options_with_which_it_was_priced():
    options = {"batch": BATCHES[tokens], "machine": "a100", "memory": "1GB"}
    ranking = shardcore.plan(tokens, devices=4, policy="auto", **options).ranking
    (both,) = (each for each in ranking.priced if each.mesh.axis_names == ("data", "seq", "model"))
    assert both.options == {"axis": "seq", "tensor": "model"}


def test_all_layouts_of_a_search_share_one_built_model():
    built = multiprocessing.get_context("fork").Value("i", 0)

    def build():
        with built.get_lock():
            built.value += 1
        return mlp()

    options = {"batch": BATCHES[mlp], "memory": "1GB"}
    plan = shardcore.plan(build, devices=4, policy="auto", **options)
    assert len(plan.ranking.priced) > 3
    # For its facts; for a copy of a block, and the block that it is compared with; for one policy
    # for all layers; and to divide steps among layers.
    assert built.value == 5


def test_a_model_that_no_policy_shards_is_data_parallel_and_has_one_row():
    def build():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1, activation="sigmoid")])
        model.compile("adam", "binary_crossentropy", metrics=[keras.metrics.AUC()])
        return model

    batch = np.zeros((ROWS, 16), "float32"), np.zeros((ROWS, 1), "float32")
    plan = shardcore.plan(build, devices=2, policy="auto", batch=batch)
    assert [priced.policy for priced in plan.ranking.priced] == ["data_parallel"]
    reasons = {layout.policy: layout.reason for layout in plan.ranking.passed_over}
    assert reasons["tensor_parallel"] == ranking.IDLE
    assert reasons["fully_sharded"] == ranking.EQUAL


def test_the_machine_at_hand_is_that_of_its_gpus(monkeypatch, caplog):
    seen = devices.CudaDevices(("Tesla T4",) * 2, (15_000_000_000, 15_500_000_000))
    monkeypatch.setattr(devices, "cuda_devices", lambda: seen)
    machine = auto._machine({})
    assert (machine.name, machine.devices, machine.memory) == ("t4", 2, 15_000_000_000)
    assert not caplog.text
    two_kinds = devices.CudaDevices(("Tesla T4", "NVIDIA L4"), seen.memory)
    monkeypatch.setattr(devices, "cuda_devices", lambda: two_kinds)
    assert machines.here() is None
    assert "Tesla T4, NVIDIA L4: no well-known machine has such devices" in caplog.text
