"""Data parallel: the gradients move once, in buckets; the loss and all metrics move together."""

import math

import keras
import pytest

from shardcore.binding.keras_private import storage_of
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.models import cnn, decoder, mlp
from tests.distributed.traffic.moved import (
    BATCH,
    DATA,
    IS_3_13,
    LENGTH,
    TOKENS,
    VOCABULARY,
    assert_same,
    compiled,
    distribute,
    lstm,
    numbers,
    trained,
    trained_shapes,
)


class Positions(keras.layers.Layer):
    """Adds what is looked up for each place, and computed of it, of which no row of a batch is."""

    def build(self, shape):
        self.table = keras.layers.Embedding(*shape[1:])
        self.dense = keras.layers.Dense(shape[-1])

    def call(self, x):
        return x + self.dense(self.table(keras.ops.arange(x.shape[1])))


def positioned():
    tokens = keras.Input((LENGTH,), dtype="int32")
    h = Positions()(keras.layers.Embedding(VOCABULARY, 8)(tokens))
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY)(h))


CASES = DATA | {positioned: (TOKENS, TOKENS)}
MODELS = (mlp, cnn, lstm, decoder, positioned)
METRICS = {mlp: ["mae", "cosine_similarity"], decoder: ["sparse_categorical_accuracy"]}
# The channels of the batch normalization of `cnn`. Its mean and mean square are two sums of the
# batch, each one all-reduce forward and one backward.
CHANNELS = 8
# Keras 3.13 takes the first output of each LSTM apart into rows, which are sharded; it uses no row.
OF_BOTH_LSTMS = 4 * BATCH // 2 * (8 + 4)
ROWS_APART = {lstm: ({"all_to_all": 2}, {"all_to_all": OF_BOTH_LSTMS})} if IS_3_13 else {}


def every_model(rank, mesh=None):
    found = {}
    for build in MODELS:
        keras.utils.clear_session(free_memory=False)
        if mesh:
            distribute(build, mesh)
        found[build.__name__] = trained(build, CASES[build], metrics=METRICS.get(build))
    return found


@pytest.fixture(scope="module")
def one_device():
    (found,) = run_ranks(every_model, 1)
    return {name: values for name, (values, _, _) in found.items()}


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(every_model, 2, (2, 1), timeout=120)


@pytest.mark.parametrize("build", MODELS)
def test_gradients_move_once_and_the_loss_with_the_metrics(build, one_device, two_ranks):
    name = build.__name__
    gradients = 4 * sum(map(math.prod, trained_shapes(build)))
    statistics = 4 if build is cnn else 0
    states = 4 * (1 + len(METRICS.get(build, ())))
    more_calls, more_moved = ROWS_APART.get(build, ({}, {}))
    for values, calls, moved in (each[name] for each in two_ranks):
        assert_same(values, one_device[name], name)
        assert calls == {"all_reduce": 2 + statistics} | more_calls
        reduced = gradients + states + statistics * CHANNELS * 4
        assert moved == {"all_reduce": reduced} | more_moved


def on_slices(rank):
    distribute(cnn, (2, 1), strategy="manual")
    return trained(cnn, DATA[cnn])


def test_slices_move_as_much(one_device):
    gradients = 4 * sum(map(math.prod, trained_shapes(cnn)))
    for values, calls, moved in run_ranks(on_slices, 2):
        assert_same(values, one_device["cnn"], "cnn on slices")
        assert calls == {"all_reduce": 2 + 4}
        assert moved == {"all_reduce": gradients + 4 + 4 * CHANNELS * 4}


def in_captured_steps(rank):
    distribute(cnn, (2, 1))
    model = compiled(cnn)
    model.train_on_batch(*DATA[cnn])
    with count_collectives() as recorded:
        model.train_on_batch(*DATA[cnn])
    for _ in range(2):
        model.train_on_batch(*DATA[cnn])
    with count_collectives() as traffic:
        model.train_on_batch(*DATA[cnn])
    return recorded, dict(traffic.calls), dict(traffic.operand_bytes)


def test_both_statistics_of_a_captured_step_move_together(two_ranks):
    for recorded, calls, moved in run_ranks(in_captured_steps, 2):
        _, calls_of_eager, moved_by_eager = two_ranks[0]["cnn"]
        assert recorded.calls == calls_of_eager
        assert recorded.operand_bytes == moved_by_eager
        # Those of the backward pass move with the gradients that are there by then.
        assert calls == {"all_reduce": 1 + 2}
        assert moved == two_ranks[0]["cnn"][2]


def in_small_buckets(rank, size):
    distribute(mlp, (2, 1))
    model = compiled(mlp, jit_compile=False)
    model.train_on_batch(*DATA[mlp])
    storage = storage_of(model._loss_tracker.variables[0])
    storage.session.strategy.tensors._buckets.size = size
    with count_collectives() as traffic:
        logs = model.train_on_batch(*DATA[mlp], return_dict=True)
    gradients = 4 * sum(math.prod(each.shape) for each in model.trainable_variables)
    return numbers(model, logs), traffic.calls["all_reduce"] - 1, gradients


def test_a_full_bucket_is_sent_while_the_pass_goes_on():
    size = 4096
    for _, buckets, gradients in run_ranks(in_small_buckets, 2, size):
        assert 1 < buckets <= -(-gradients // size) + 1


def after_a_failure(rank, mesh=None):
    if mesh:
        distribute(mlp, mesh)
    model = compiled(mlp, jit_compile=False)
    x, y = DATA[mlp]
    with count_collectives() as before:
        model.train_on_batch(x, y)

    def fail(_gradient):
        raise RuntimeError("half way")

    handle = model.layers[1].kernel.value.register_hook(fail)
    with pytest.raises(RuntimeError, match="half way"):
        model.train_on_batch(x, y)
    handle.remove()
    model.reset_metrics()
    with count_collectives() as after:
        logs = model.train_on_batch(x, y, return_dict=True)
    return numbers(model, logs), before.operand_bytes["all_reduce"], after.operand_bytes


def test_a_pass_that_failed_leaves_no_gradients_in_the_buckets():
    # Without a group: Keras 3.16 wraps a model in DDP, which does not survive a failure.
    ((expected, _, _),) = run_ranks(after_a_failure, 1, init=False)
    for found, before, after in run_ranks(after_a_failure, 2, (2, 1)):
        assert_same(found, expected, "after a failure")
        assert after == {"all_reduce": before}
