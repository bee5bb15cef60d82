"""`shardcore.explain`: every collective of a step, with its layer, axis and reason."""

import xml.etree.ElementTree as ElementTree
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import keras
import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore import bootstrap
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.inspection.explained import X, Y, compiled, distribute_by, net
from tests.distributed.models import CASES, decoder, mlp
from tests.distributed.programs import distribute, distribute_by_policy, local

ACTIVATION = 8 * 6 * 16 * 4  # the bytes of an activation between the decoder's layers


def planned(build, mesh, policy, strategy):
    """A compiled model under a policy's layout map."""
    distribute_by_policy(build, mesh, policy, strategy)
    return compiled(build())


def explained_and_counted(rank, build, mesh, policy, strategy):
    """The explanation of a step, and what was counted around the same step."""
    keras.utils.set_random_seed(1)
    model = planned(build, mesh, policy, strategy)
    model.train_on_batch(*CASES[build])
    explanation = shardcore.explain(model, CASES[build])
    model.reset_metrics()
    with count_collectives() as traffic:
        model.train_function([(*CASES[build], None)])
    trainable = {v.path: local(v).nbytes for v in model.trainable_variables}
    layers = [layer.path or layer.name for layer in model._flatten_layers() if layer.variables]
    return explanation, traffic, trainable, layers


@pytest.mark.parametrize(
    ("build", "mesh", "policy", "strategy"),
    [
        (mlp, (2, 1), "data_parallel", "dtensor"),
        (mlp, (2, 1), "data_parallel", "manual"),
        (decoder, (2, 1), "fully_sharded", "dtensor"),
        (decoder, (1, 2), "tensor_parallel", "manual"),
    ],
)
def test_the_explanation_lists_the_collectives_that_are_counted(
    build, mesh, policy, strategy, tmp_path
):
    for found in run_ranks(explained_and_counted, 2, build, mesh, policy, strategy, timeout=120):
        explanation, traffic, trainable, layers = found
        assert_counted(explanation, traffic)
        axis = ("data",) if mesh == (2, 1) else ("model",)
        assert {each.axes for each in explanation.collectives} == {axis}
        assert {each.ranks for each in explanation.collectives} == {2}
        if policy == "data_parallel":
            gradients = assert_gradients(explanation, trainable)
            assert sum(each.operand_bytes for each in gradients) == sum(trainable.values())
        if strategy == "dtensor" and build is mlp:  # its metrics are reduced at the end, together
            assert "loss/total" in explanation.collectives[-1].variables
            assert "the new value" in explanation.collectives[-1].reason
        assert_pictured(explanation, layers, tmp_path)


def assert_counted(explanation, traffic):
    assert explanation.collectives
    assert explanation.calls == traffic.calls
    assert explanation.operand_bytes == traffic.operand_bytes


def assert_gradients(explanation, trainable):
    """The gradient of each trainable variable goes once over the batch axis."""
    gradients = [
        each
        for each in explanation.collectives
        if each.phase == "backward" and each.variables and each.axes == ("data",)
    ]
    paths = [path for each in gradients for path in each.variables]
    assert sorted(paths) == sorted(trainable)
    assert all("summed" in each.reason and each.kind == "all_reduce" for each in gradients)
    return gradients


def assert_pictured(explanation, layers, folder):
    assert sorted(each.path for each in explanation.layers) == sorted(layers)
    picture = ElementTree.fromstring(explanation.save(folder / "step.svg").read_text())
    texts = "".join(picture.itertext())
    assert all(path.rpartition("/")[2] in texts for path in layers)


def test_the_all_reduces_of_a_block_are_listed_at_their_layers(tmp_path):
    args = (decoder, (2, 2), "tensor_parallel", "dtensor")
    for found in run_ranks(explained_and_counted, 4, *args, timeout=120):
        explanation, traffic, trainable, layers = found
        assert_counted(explanation, traffic)
        over_model = [each for each in explanation.collectives if each.axes == ("model",)]
        assert {each.kind for each in over_model} == {"all_reduce"}
        activations = [each for each in over_model if each.operand_bytes == ACTIVATION // 2]
        assert [(each.phase, each.layer) for each in activations] == [
            ("forward", "tokens"),
            ("forward", "block_0/attention/attention_output"),
            ("forward", "block_0/contract"),
            ("backward", "block_0"),  # the input of the head, whose columns are sharded
            ("backward", "block_0/mlp_norm"),
            ("backward", "block_0/attention_norm"),
        ]
        assert "the layer's output: a partial sum over axis 'model'" in activations[1].reason
        assert "the gradient of the output of block_0/mlp_norm" in activations[4].reason
        others = [each for each in over_model if each not in activations]
        assert [each.phase for each in others] == [
            *("loss and metrics", "loss and metrics", "backward"),  # of the loss of sharded logits
            *("loss and metrics", "loss and metrics"),  # accuracy; the loss and the metrics
        ]
        assert_gradients(explanation, trainable)
        assert not explanation.avoidable
        assert_pictured(explanation, layers, tmp_path)


@pytest.mark.parametrize(
    ("build", "mesh", "policy", "strategy"),
    [
        (mlp, (2, 2), "fully_sharded", "manual"),
        (decoder, (1, 4), "sequence_parallel", "dtensor"),
    ],
)
def test_simulated_ranks_move_what_real_ranks_move(build, mesh, policy, strategy):
    def program(rank, is_simulated):
        if is_simulated:
            bootstrap.simulate(4)
        keras.utils.set_random_seed(1)
        return shardcore.explain(planned(build, mesh, policy, strategy), CASES[build])

    (simulated,) = run_ranks(program, 1, True, init=False, timeout=120)
    first, *_ = run_ranks(program, 4, False, timeout=120)
    assert simulated.collectives
    assert simulated == first


def gathers(explanation, layer):
    return [
        each
        for each in explanation.collectives
        if each.kind == "all_gather" and each.phase == "forward" and each.layer == layer
    ]


FORCED = [
    (  # sharded by columns, and by columns again: the input of the second is gathered
        {".*up/kernel": (None, "model"), ".*down/kernel": (None, "model"),
         ".*down/bias": ("model",)},
        "net/down",
        {"net/down/kernel": ("model", None), "net/down/bias": (None,)},
    ),
    (  # a norm needs its input whole
        {".*down/kernel": (None, "model")}, "net/norm", {"net/down/kernel": (None, None)}
    ),
    (
        {".*up/kernel": (None, "model"), ".*up/output": ("data", None),
         ".*down/kernel": ("model", None)},
        "net/up",
        {".*up/output": None},
    ),
    ({".*norm/gamma": ("model",)}, "net/norm", {"net/norm/gamma": (None,)}),
]  # fmt: skip


def test_an_avoidable_gather_is_gone_once_its_advice_is_followed():
    def program(rank):
        return [(explained(rules), explained(followed(rules, c))) for rules, _, c in FORCED]

    def explained(rules):
        distribute((1, 2), rules)
        return shardcore.explain(net(), (X, Y))

    def followed(rules, changed):
        return {key: spec for key, spec in {**rules, **changed}.items() if spec is not None}

    for found in run_ranks(program, 2, timeout=120):
        for (forced, better), (_, layer, changed) in zip(found, FORCED, strict=True):
            assert forced.avoidable[0].collective in gathers(forced, layer)
            assert forced.avoidable[0].rules == changed
            assert "Avoidable: " in str(forced)
            assert not gathers(better, layer)
            assert not better.avoidable
            assert sum(better.calls.values()) <= sum(forced.calls.values())


def test_an_operator_that_cannot_be_sharded_is_named():
    def program(rank):
        distribute((2, 1))
        x = keras.Input((4, 4))
        y = keras.layers.Lambda(lambda t: torch.linalg.lstsq(t.reshape(-1, 4), t.reshape(-1, 4))[0])
        model = keras.Model(x, y(x))
        return shardcore.explain(model, np.random.default_rng(0).normal(size=(4, 4, 4)), "predict")

    for explanation in run_ranks(program, 2):
        reasons = [
            each.reason for each in explanation.collectives if "cannot be sharded" in each.reason
        ]
        assert reasons
        assert all("lstsq" in each for each in reasons)


def test_the_bytes_of_every_kind_of_collective_are_those_of_its_operand():
    def program(rank):
        group = dist.group.WORLD
        with count_collectives() as traffic:
            dist.all_reduce(torch.zeros(3), group=group)
            dist.all_gather([torch.zeros(5), torch.zeros(5)], torch.zeros(5))
            dist.all_gather_single(torch.zeros(10), torch.zeros(5))
            dist.reduce_scatter_single(torch.zeros(4), torch.zeros(8))
            dist.all_to_all_single(torch.zeros(6), torch.zeros(6))
            dist.broadcast(torch.zeros(7), 0)
        return traffic

    for traffic in run_ranks(program, 2):
        assert traffic.calls == {
            "all_reduce": 1, "all_gather": 2, "reduce_scatter": 1, "all_to_all": 1, "broadcast": 1
        }  # fmt: skip
        assert traffic.operand_bytes == {
            "all_reduce": 12, "all_gather": 40, "reduce_scatter": 32, "all_to_all": 24,
            "broadcast": 28,
        }  # fmt: skip


def test_the_page_shows_the_example(tmp_path):
    root = Path(__file__).parents[3]

    def program(rank):
        spec = spec_from_file_location("example", root / "examples" / "explain.py")
        example = module_from_spec(spec)
        spec.loader.exec_module(example)
        return example.main(tmp_path / "step.svg")

    explanation = run_ranks(program, 4, timeout=120)[0]
    assert explanation.text(80) in (root / "docs" / "how-to" / "explain.md").read_text()
    picture = root / "docs" / "images" / "explain.svg"
    assert picture.read_text() == (tmp_path / "step.svg").read_text()


def test_a_weight_is_cast_and_is_still_named():
    def program(rank):
        shardcore.install("manual")
        keras.distribution.set_distribution(distribute_by((2, 1), {".*up/kernel": ("data", None)}))
        keras.config.set_dtype_policy("mixed_bfloat16")
        return shardcore.explain(net(), X, "predict")

    for explanation in run_ranks(program, 2):
        gather, _returned = explanation.collectives
        assert (gather.variables, gather.operand_bytes) == (("net/up/kernel",), 8 * 32 * 2)
        assert gather.reason == (
            "net/up/kernel: sharded over the batch axis 'data', all-gathered for aten.mm.default"
        )
