"""Recurrent layers by cuDNN, which `tests.cuda_recurrent` computes: as on one device."""

import sys
from functools import partial

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.testing import count_collectives, run_ranks
from tests import cuda_recurrent
from tests.distributed.cuda.recurrent_cases import (
    CASES,
    SIZE,
    STEPS,
    Case,
    arrays,
    by_cudnn,
    on_cpu,
    results,
)
from tests.distributed.interpreter_events import follow
from tests.distributed.programs import AXES, as_arrays, assert_close, distribute, placements
from tests.fallbacks import fallbacks


def one_device(batch):
    """The numbers of torch's own layers of the CPU, without a mesh."""
    found = {name: results(on_cpu, case, *arrays(case, batch)) for name, case in CASES.items()}
    return as_arrays(found)


def over_ranks(rank, mesh, batch, axes):
    """The numbers, where they are, the collectives, and the shapes of the local inputs."""
    distribute(mesh)
    values, places, moved, shapes = {}, {}, {}, {}
    for name, case in CASES.items():
        x, states, weights, scales = arrays(case, batch)
        rows = (axes, None, None) if case.batch_first else (None, axes, None)
        x = [shardcore.distribute_tensor(each, rows) for each in x]
        weights = [shardcore.distribute_tensor(each, (None,) * each.ndim) for each in weights]
        with cuda_recurrent.on_cpu() as calls, count_collectives() as traffic:
            found = results(by_cudnn, case, x, states, weights, scales)
        values[name], moved[name] = found, dict(traffic.calls)
        places[name] = {each: placements(value) for each, value in found.items()}
        if case.batch_first:
            # cuDNN computes step by step, so that the steps are outermost in memory.
            both = found["result 0"], found["x 0"]
            assert all(each.transpose(0, 1).is_contiguous() for each in both)
            assert all(each.to_local().transpose(0, 1).is_contiguous() for each in both)
        shapes[name] = [shape for _, shape in calls]
    return as_arrays(values), places, moved, shapes, dict(fallbacks())


@pytest.mark.parametrize(
    ("mesh", "batch", "axes"),
    [((2, 1), 3, "data"), ((2, 2), 4, "data"), ((2, 2), 5, ("model", "data"))],
)
def test_the_batch_stays_sharded_and_nothing_moves(mesh, batch, axes):
    """Uneven batches, and those of two axes, among them. Gradients of weights are sums."""
    expected, ranks = one_device(batch), run_ranks(over_ranks, mesh[0] * mesh[1], mesh, batch, axes)
    for rank, (values, places, moved, shapes, counted) in enumerate(ranks):
        rows = rows_of(mesh, batch, axes)[rank]
        for name, case in CASES.items():
            assert_close([values[name]], expected[name])
            own = (rows, STEPS, SIZE) if case.batch_first else (STEPS, rows, SIZE)
            assert shapes[name] == [own, own]
            for each, where in places[name].items():
                first = each in ("result 0", "x 0") and case.batch_first
                sharding = "P(sum)" if each.startswith("weight") else "S(0)" if first else "S(1)"
                whole = ("R",) if axes == "data" else (sharding,)
                assert where.split() == [sharding, *whole], f"{name}: {each}"
        assert set(map(str, moved.values())) == {"{}"}
        assert counted == {}


def rows_of(mesh, batch, axes):
    """The number of rows of each rank."""
    layout = Layout(Mesh(mesh, AXES), (axes,))
    return [layout.local_shape((batch,), rank)[0] for rank in range(mesh[0] * mesh[1])]


def test_features_that_are_sharded_are_exchanged_for_rows_and_weights_are_gathered():
    """The gradient reads these copies. A tensor of all weights, made from shards, is not read."""
    name, batch = "lstm, two layers, both directions", 4

    def program(rank):
        distribute((2, 2))
        x, states, weights, scales = arrays(CASES[name], batch)
        x = [shardcore.distribute_tensor(x[0], ("data", None, "model"))]
        states = [shardcore.distribute_tensor(each, (None, None, "model")) for each in states]
        weights = [
            shardcore.distribute_tensor(each, (None, "model")[-each.ndim :]) for each in weights
        ]
        with cuda_recurrent.on_cpu() as calls, count_collectives() as traffic:
            call = partial(by_cudnn, buffer=torch.zeros(1))
            found = results(call, CASES[name], x, states, weights, scales)
        return as_arrays(found), dict(traffic.calls), placements(found["weight 0"]), calls

    expected = one_device(batch)[name]
    for values, moved, where, calls in run_ranks(program, 4):
        assert_close([values], expected)
        assert moved == {"all_to_all": 1 + 2, "all_gather": 16}
        assert where == "P(sum) P(sum)"
        assert [shape for _, shape in calls] == [(1, STEPS, SIZE)] * 2


@pytest.mark.parametrize("name", ["lstm", "lstm, steps first"])
def test_a_gradient_is_sharded_as_its_call_was(name):
    """By rows over one axis only, though features of the gradients are sharded over the other."""
    case, batch = CASES[name], 4
    rows = ("data", None) if case.batch_first else (None, "data")

    def program(rank):
        distribute((2, 2))
        x, states, weights, scales = arrays(case, batch)
        x = [shardcore.distribute_tensor(x[0], (*rows, None))]
        specs = (*rows, "model"), *[(None, None, "model")] * 2
        scales = [*map(shardcore.distribute_tensor, scales, specs)]
        with cuda_recurrent.on_cpu() as calls:
            found = results(by_cudnn, case, x, states, weights, scales)
        return as_arrays(found), calls

    expected = one_device(batch)[name]
    for values, calls in run_ranks(program, 4):
        assert_close([values], expected)
        assert calls[0][1] == calls[1][1]
        assert calls[0][1][0 if case.batch_first else 1] == batch // 2


@pytest.mark.parametrize(("batch", "dropout"), [(1, 0.0), (4, 0.5)])
def test_what_cannot_be_sharded_runs_on_full_operands(batch, dropout):
    """A batch with fewer rows than ranks; dropout, for which all ranks draw alike."""
    case = CASES["lstm, two layers, both directions"]

    def program(rank):
        distribute((2, 1))
        x, *others = arrays(case, batch)
        x = [shardcore.distribute_tensor(x[0], ("data", None, None))]
        with cuda_recurrent.on_cpu() as calls:
            found = results(partial(by_cudnn, dropout=dropout), case, x, *others)
        return as_arrays(found), placements(found["result 0"]), calls, sum(fallbacks().values())

    expected = one_device(batch)["lstm, two layers, both directions"]
    for values, where, calls, counted in run_ranks(program, 2):
        assert_close([values], expected)
        assert where == "R R"
        assert [shape for _, shape in calls] == [(batch, STEPS, SIZE)] * 2
        assert counted == 2


def test_one_tensor_of_all_weights_is_handed_on():
    """torch makes one if the weights are in one piece of memory; the wrong one is refused.

    It gives the state of an earlier dropout too, which no call without dropout reads.
    """
    case, batch = CASES["gru"], 4

    def program(rank):
        distribute((2, 1))
        x, states, weights, scales = arrays(case, batch)
        x = [shardcore.distribute_tensor(x[0], ("data", None, None))]
        packed = torch.cat([each.reshape(-1) for each in weights])
        with cuda_recurrent.on_cpu():
            state = torch.zeros(8, dtype=torch.uint8)
            call = partial(by_cudnn, buffer=packed, dropout_state=state)
            found = results(call, case, x, states, weights, scales)
            with pytest.raises(AssertionError):
                by_cudnn(case, *x, states, weights, buffer=packed + 1)
        return as_arrays(found)

    assert_close(run_ranks(program, 2), one_device(batch)["gru"])


def test_sequences_of_several_lengths_run_on_full_operands():
    """They have one dim for rows and steps, and no kernel here."""

    def program(rank):
        distribute((2, 1))
        x, states, weights, _ = arrays(CASES["gru"], 2)
        packed = shardcore.distribute_tensor(x[0].reshape(6, SIZE), ("data", None))
        with cuda_recurrent.on_cpu() as calls, pytest.raises(AssertionError):
            by_cudnn(CASES["gru"], packed, states, weights, batch_sizes=[2, 2, 2])
        return calls

    assert run_ranks(program, 2) == [[("_cudnn_rnn", (6, SIZE))]] * 2


class Recurrent(keras.layers.Layer):
    """An LSTM as Keras runs it on CUDA: by one call of torch."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 16), name="kernel")
        self.recurrent_kernel = self.add_weight(shape=(4, 16), name="recurrent_kernel")
        self.bias = self.add_weight(shape=(16,), name="bias")

    def call(self, x):
        sys.audit(RECURRED)
        states = [torch.zeros(1, x.shape[0], 4) for _ in range(2)]
        kernels = (self.kernel, self.recurrent_kernel)
        weights = [keras.ops.convert_to_tensor(each).T.contiguous() for each in kernels]
        weights += [keras.ops.convert_to_tensor(self.bias).contiguous(), torch.zeros(16)]
        return self.run(Case(), x, states, weights)[0][:, -1]

    def compute_output_shape(self, shape):
        return shape[0], 4


RECURRED, ran = "shardcore.tests.recurred", []


def trained(run):
    """Losses and weights after six steps."""
    follow(RECURRED, ran)
    keras.utils.set_random_seed(7)
    Recurrent.run = staticmethod(run)
    x = keras.Input((5, 8))
    model = keras.Model(x, keras.layers.Dense(3, name="head")(Recurrent(name="recurrent")(x)))
    model.compile("sgd", "mse")
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(6, 4, 5, 8)), rng.normal(size=(6, 4, 3))
    losses, moved = [], []
    for each in zip(x, y, strict=True):
        with count_collectives() as traffic:
            losses.append(model.train_on_batch(*each))
        moved.append(dict(traffic.calls))
    return dict(enumerate([np.asarray(losses), *model.get_weights()])), moved


@pytest.mark.parametrize(
    ("rules", "eager", "captured"),
    [
        # Data parallel: one for all variables, and the loss; then one for all.
        ({}, {"all_reduce": 1 + 1}, {"all_reduce": 1}),
        # Fully sharded: as any other kernels.
        (
            {"recurrent/.*kernel": ("data", None)},
            {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1 + 1},
            {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1},
        ),
    ],
)
def test_a_layer_of_keras_trains_by_them_in_captured_steps(rules, eager, captured):

    def program(rank):
        distribute((2, 1), rules)
        with cuda_recurrent.on_cpu() as calls:
            values, moved = trained(by_cudnn)
        return values, moved, calls, len(ran), dict(fallbacks())

    ((expected, _),) = run_ranks(lambda rank: trained(on_cpu), 1)
    for values, moved, calls, runs, counted in run_ranks(program, 2):
        assert_close([values], expected)
        assert [shape for _, shape in calls] == [(2, 5, 8)] * 2 * 6
        assert moved == [eager] * 2 + [captured] * 4
        assert runs == 3, "once for shapes, and in the two steps that are recorded"
        assert counted == {}
