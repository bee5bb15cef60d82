"""Operators of a user run on shards by their declared rules, with the numbers of one device."""

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.domain.errors import ArgumentProblem, RankMismatchError
from shardcore.testing import count_collectives, run_ranks
from tests import own_operators
from tests.distributed.capture.steps import Spy, calls
from tests.distributed.programs import as_arrays, assert_close, assert_fails_everywhere, distribute
from tests.fallbacks import fallbacks
from tests.own_operators import RULES, Scaled, operator

X, KERNEL, ROW, BIAS = (6, 8), (8, 4), (8,), (4,)
# Each with its operands, and their layouts that need no all-gather on a mesh (1, 2) and (2, 1).
CALLS = {
    "scale": (operator("scale"), (X, ROW), ((None, "model"), ("model",))),
    "scale, rows": (operator("scale"), (X, ROW), (("data", None), (None,))),
    "function": (Scaled.apply, (X, ROW), ((None, "model"), ("model",))),
    "function, rows": (Scaled.apply, (X, ROW), (("data", None), (None,))),
    "project": (
        lambda x, kernel, bias: operator("project")(x, kernel, bias, by=2.0),
        (X, KERNEL, BIAS),
        ((None, None), (None, "model"), ("model",)),
    ),
    "project, summed": (
        lambda *operands: operator("project")(*operands).reshape(-1),
        (X, KERNEL, BIAS),
        ((None, "model"), ("model", None), (None,)),
    ),
    "project, no bias": (
        lambda x, kernel: operator("project")(x, kernel, None).reshape(-1),
        (X, KERNEL),
        (("data", None), (None, None)),
    ),
    # A rank cuts its columns of what it has in full: they have gaps in memory.
    "scale, columns cut": (operator("scale"), (X, ROW), ((None, None), ("model",))),
}


def computed(call, mesh):
    """Result and gradients, the collectives of the forward pass, and the fall-backs."""
    function, shapes, specs = CALLS[call]
    rng = np.random.default_rng(1)
    operands = [torch.tensor(rng.normal(size=shape), dtype=torch.float32) for shape in shapes]
    if mesh:
        operands = [
            shardcore.distribute_tensor(operand, spec)
            for operand, spec in zip(operands, specs, strict=True)
        ]
    operands = [operand.requires_grad_() for operand in operands]
    with count_collectives() as traffic:
        result = function(*operands)
    if mesh:
        assert result.to_local().is_contiguous() == result.is_contiguous()
    gradients = torch.autograd.grad((result * result).sum(), operands)
    values = {str(number): tensor for number, tensor in enumerate((result, *gradients))}
    return as_arrays(values), dict(traffic.calls), sorted(fallbacks())


def run_all(rank, mesh, strategy, declares):
    if declares == "before":
        own_operators.declare_all()
    if mesh:
        distribute(mesh, strategy=strategy)
    if declares == "after":
        own_operators.declare_all()
    return {call: computed(call, mesh) for call in CALLS}


@pytest.fixture(scope="module")
def expected():
    (values,) = run_ranks(run_all, 1, None, None, None)
    return {call: of_call for call, (of_call, _, _) in values.items()}


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
@pytest.mark.parametrize(("mesh", "declares"), [((1, 2), "after"), ((2, 1), "before")])
def test_a_declared_operator_runs_on_shards(strategy, mesh, declares, expected):
    results = run_ranks(run_all, 2, mesh, strategy, declares)
    for call in CALLS:
        assert_close([of_rank[call][0] for of_rank in results], expected[call], atol=1e-4)
        for of_rank in results:
            assert of_rank[call][1:] == ({}, []), call


def test_without_a_rule_an_operator_runs_on_full_tensors(expected):
    results = run_ranks(run_all, 2, (1, 2), "dtensor", None)
    for call in ("scale", "project", "function"):
        assert_close([of_rank[call][0] for of_rank in results], expected[call], atol=1e-4)
    assert results[0]["scale"][1]["all_gather"]
    assert "own_tests.scale.default" in results[0]["scale"][2]


def test_operands_that_do_not_fit_the_rule_are_full():
    def program(rank):
        own_operators.declare_all()
        distribute((2, 1))
        x = shardcore.distribute_tensor(torch.ones(4, 3, 8), ("data", None, None))
        return as_arrays(operator("scale")(x, torch.arange(8.0))), sorted(fallbacks())

    for value, fell_back in run_ranks(program, 2):
        np.testing.assert_array_equal(value, np.ones((4, 3, 1)) * np.arange(8))
        assert fell_back == ["own_tests.scale.default"]


class Scale(keras.layers.Layer):
    """A layer of a user, with an operator that has its own gradient."""

    def build(self, shape):
        self.weight = self.add_weight(shape=shape[-1:], initializer="ones", name="weight")

    def call(self, x):
        return operator("scale")(x, self.weight.value)


# Columns stay sharded from one layer to the next: nothing has to be all-gathered.
LAYOUTS = {
    ".*wide/kernel": (None, "model"),
    ".*wide/bias": ("model",),
    ".*wide/output": ("data", "model"),
    ".*scale/weight": ("model",),
    ".*scale/output": ("data", "model"),
    ".*head/kernel": ("model", None),
}


def trained(mesh, jit_compile, declares=True, later=False):
    """Losses and weights of a model with such a layer, and the fall-backs of its first steps.

    Of its last steps, the collectives, and how often they ran Python.
    """
    if declares and not later:
        own_operators.declare_all()
    if mesh:
        distribute(mesh, LAYOUTS)
    keras.utils.set_random_seed(1)
    wide, head = keras.layers.Dense(8, name="wide"), keras.layers.Dense(1, name="head")
    model = keras.Sequential([keras.Input((5,)), Spy(), wide, Scale(name="scale"), head])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit_compile)
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(6, 5)).astype("float32"), rng.normal(size=(6, 1)).astype("float32")
    losses = [float(model.train_on_batch(x, y)) for _ in range(4)]
    fell_back = sorted(fallbacks())
    if later:
        own_operators.declare_all()
    calls.clear()
    with count_collectives() as traffic:
        losses += [float(model.train_on_batch(x, y)) for _ in range(4)]
    weight = model.get_layer("scale").weight.numpy()
    return {"losses": losses, "weight": weight}, fell_back, traffic.calls, len(calls)


@pytest.mark.parametrize("jit_compile", ["auto", False])
@pytest.mark.parametrize("mesh", [(1, 2), (2, 1)])
def test_a_layer_of_a_user_trains_on_shards(jit_compile, mesh, monkeypatch):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")
    ((expected, *_),) = run_ranks(lambda rank: trained(None, False), 1)
    results = run_ranks(lambda rank: trained(mesh, jit_compile), 2)
    assert_close([values for values, *_ in results], expected)
    for _, fell_back, moved, runs in results:
        assert fell_back == []
        assert not moved["all_gather"]
        assert runs == (0 if jit_compile else 4)


def test_a_captured_step_is_captured_again_after_a_later_declaration(monkeypatch):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")
    ((expected, *_),) = run_ranks(lambda rank: trained(None, False), 1)
    results = run_ranks(lambda rank: trained((1, 2), "auto", later=True), 2)
    for values, fell_back, moved, runs in results:
        assert_close([values], expected)
        assert "own_tests.scale.default" in fell_back
        assert not moved["all_gather"]
        assert runs == 2


def declared_apart(rank, where):
    texts = [RULES["scale"], "n -, - -> n -"]
    if where == "before" or (where == "one rank" and rank == 0):
        shardcore.operator_rule(operator("scale"), texts[rank])
    distribute((1, 2))
    if where == "after":
        shardcore.operator_rule(operator("scale"), texts[rank])


@pytest.mark.parametrize(
    ("where", "match"),
    [
        ("before", "Rank 0 has the rule 'n k, k -> n k' for operator own_tests.scale.default, and"),
        ("one rank", "rank 1 has 'none'"),
        ("after", "is at operator_rule.own_tests.scale.default, 'n .*, but rank . is at operator_"),
    ],
)
def test_rules_that_differ_between_ranks_are_an_error_on_all(where, match):
    assert_fails_everywhere(declared_apart, 2, where, error=RankMismatchError, match=match)


def test_a_rule_is_declared_once():
    def program(rank):
        shardcore.operator_rule(operator("scale"), "n k, k -> n k")
        shardcore.operator_rule(operator("scale"), "n  k,k -> n k")  # it is the same
        with pytest.raises(ArgumentProblem, match="which has 'n k, k -> n k' already"):
            shardcore.operator_rule(operator("scale"), "n -, - -> n -")
        return True

    assert run_ranks(program, 1) == [True]
