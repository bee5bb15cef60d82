"""Operators that are sharded by rules: the numbers of one device, exact counts of collectives."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.adapters.engine import autograd
from shardcore.adapters.engine.operators import layers, lookups
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.operators.operator_cases import MOVED, SHARDED, WHOLE, Case, N, convolution
from tests.distributed.programs import as_arrays, assert_close, distribute, placements
from tests.fallbacks import fallbacks, forget_fallbacks

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "operators.md"


def run(case, mesh):
    """The result and gradients, their placements, what was moved, and the fall-backs."""
    rng = np.random.default_rng(0)
    operands = [torch.tensor(rng.normal(size=shape), dtype=torch.float32) for shape in case.shapes]
    if mesh:
        operands = [
            each if spec is None else shardcore.distribute_tensor(each, spec)
            for each, spec in zip(operands, case.specs, strict=True)
        ]
    for each in operands:
        each.requires_grad_()
    forget_fallbacks()
    with count_collectives() as forward:
        result = case.function(*operands, **case.named)
    seed = as_placed(torch.tensor(rng.normal(size=result.shape), dtype=torch.float32), result)
    with count_collectives() as backward:
        gradients = torch.autograd.grad(result, operands, seed)
    found = {str(number): each for number, each in enumerate((result, *gradients))}
    words = [placements(each) for each in (result, *gradients)]
    fell_back = sorted(fallbacks())
    return as_arrays(found), words, dict(forward.calls), dict(backward.calls), fell_back


def as_placed(value, result):
    """`value` sharded as `result` is, replicated where that is pending."""
    if not isinstance(result, ShardedTensor):
        return value
    return autograd.redistribute(value, result.mesh_layout.reduced, result.engine)


def run_all(rank, cases, mesh):
    if mesh:
        distribute(mesh)
    return {name: run(case, mesh) for name, case in cases.items()}


def compare(cases, mesh):
    """Per case what one device gives, and what each rank gives and reports."""
    (expected,) = run_ranks(run_all, 1, cases, None)
    results = run_ranks(run_all, mesh[0] * mesh[1], cases, mesh)
    return {name: (expected[name][0], [each[name] for each in results]) for name in cases}


def of_each_rank(compared, name):
    """The facts of a case from each rank; its values are those of one device."""
    expected, results = compared[name]
    assert_close([values for values, *_ in results], expected, atol=1e-4)
    return [facts for _, *facts in results]


def on_model(placed):
    """As `placements` says it on a mesh (1, 2)."""
    return [f"R {placement.replace(',', ', ').replace('_', ' ')}" for placement in placed.split()]


@pytest.fixture(scope="module")
def compared():
    return compare(SHARDED | WHOLE, (1, 2))


@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_operand_stays_sharded_and_moves_the_fewest_bytes(compared, name):
    case = SHARDED[name]
    for each in of_each_rank(compared, name):
        assert each == [on_model(case.placed), case.moved, case.moved_back, []]


@pytest.mark.parametrize("name", WHOLE)
def test_an_operator_that_cannot_be_sharded_runs_on_full_operands_and_warns(compared, name):
    for words, _, _, fell_back in of_each_rank(compared, name):
        assert words == on_model(WHOLE[name].placed)
        assert len(fell_back) == 2, fell_back  # forward and backward


def test_two_axes_shard_two_factors():
    cases = {
        "two dims": convolution([("data", N, N, N), ("model", N, N, N), N], "S(0) S(1)"),
        "batch by both": convolution([(("data", "model"), N, N, N), N, N], "S(0) S(0)"),
        "unbind": Case(rows, [(4, 4)], [("data", "model")], "S(0) S(0)", MOVED),
    }
    compared = compare(cases, (2, 2))
    for name, case in cases.items():
        for words, moved, _, fell_back in of_each_rank(compared, name):
            assert (words[0], moved) == (case.placed, case.moved)
            assert fell_back == [], name


def test_frames_of_rows_stay_sharded():
    """As `torch.stft` takes them; frames that go beyond a row run on full operands."""

    def program(rank):
        distribute((2, 1))
        found = []
        for rows, frames in ((3, 5), (2, 8)):
            x = shardcore.distribute_tensor(torch.arange(36.0).reshape(3, 12), ("data", None))
            forget_fallbacks()
            with count_collectives() as traffic:
                result = x.as_strided((rows, frames, 4), (12, 2, 1))
            facts = placements(result), dict(traffic.calls), list(fallbacks())
            found.append((result.full_tensor().numpy(), *facts))
        return found

    numbers = np.arange(36, dtype="float32")
    for within, beyond in run_ranks(program, 2):
        for rows, frames, found in ((3, 5, within[0]), (2, 8, beyond[0])):
            places = [
                [[12 * row + 2 * at + n for n in range(4)] for at in range(frames)]
                for row in range(rows)
            ]
            np.testing.assert_array_equal(found, numbers[places])
        assert within[1:] == ("S(0) R", {}, [])
        assert beyond[1:] == ("R R", {"all_gather": 1}, ["aten.as_strided.default"])


def rows(x):
    """The sum of the first two rows, weighted."""
    first, second, *_ = torch.unbind(x)
    return first * 2 + second * 3


def test_a_convolutional_model_moves_no_kernel():
    """Three kernels, all sharded by their last dim: activations meet them whole."""

    def train(rank, mesh):
        if mesh:
            distribute(mesh, {".*kernel": (N, N, N, "model")})
        keras.utils.set_random_seed(1)
        layers = [
            keras.layers.Conv2D(4, 3, activation="relu6"),
            keras.layers.MaxPooling2D(2),
            keras.layers.ZeroPadding2D(1),
            keras.layers.Conv2D(6, 3),
            keras.layers.Conv2DTranspose(2, 2),
            keras.layers.GlobalAveragePooling2D(),
        ]
        model = keras.Sequential([keras.Input((8, 8, 2)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        rng = np.random.default_rng(0)
        data = rng.normal(size=(5, 8, 8, 2)), rng.normal(size=(5, 2))
        model.train_on_batch(*data)
        forget_fallbacks()
        with count_collectives() as traffic:
            loss = model.train_on_batch(*data)
        return float(loss), model.get_weights(), dict(traffic.calls), dict(fallbacks())

    ((loss, weights, _, _),) = run_ranks(train, 1, None)
    for own_loss, own_weights, calls, fell_back in run_ranks(train, 2, (1, 2)):
        assert own_loss == pytest.approx(loss, abs=1e-5)
        for own, one in zip(own_weights, weights, strict=True):
            np.testing.assert_allclose(own, one, atol=1e-5)
        # The inputs of the convolutions, found again on the way back; two gradients of them, of
        # which one comes back in the layout of its input.
        moved = {"all_gather": 3, "all_reduce": 1, "reduce_scatter": 1}
        assert (calls, fell_back) == (moved, {})


def test_the_documentation_names_every_operator():
    text = DOCS.read_text()
    operators = {*layers.PLANNERS, *lookups.HANDLERS}
    names = {str(each).removeprefix("aten.").partition(".")[0] for each in operators}
    plain = {re.sub(r"([123]d)?(_with_indices)?(_backward)?$", "", name) for name in names}
    assert not [name for name in plain if name not in text]
