"""Ranks that come apart after the first step are found; what cannot be done together is refused."""

import threading

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.domain.errors import CallProblem, RankMismatchError
from shardcore.testing import run_ranks
from tests.distributed.programs import assert_fails_everywhere, distribute
from tests.distributed.regression import KERNEL, X, build, fit


def between_epochs(act):
    """A callback that acts once, after the first epoch."""
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, _: epoch == 0 and act())


def draw_on_rank_1(rank, auto_shard_dataset):
    distribute((2, 1), auto_shard_dataset=auto_shard_dataset)
    fit(build(dropout=0.5), callbacks=[between_epochs(lambda: rank and torch.rand(1))])


@pytest.mark.parametrize("auto_shard_dataset", [True, False])
def test_a_generator_that_one_rank_draws_from_is_found_before_the_next_epoch(auto_shard_dataset):
    assert_fails_everywhere(
        draw_on_rank_1, 2, auto_shard_dataset, error=RankMismatchError,
        match="torch's generator: rank 1 has state .*set_random_seed.*torch.Generator",
    )  # fmt: skip


PARTED = {
    "learning rate": (
        lambda model: model.optimizer.learning_rate.assign(0.01),
        r"copy of sgd/learning_rate: rank 1 has values that sum to 0\.10*1.*, rank 0 has .* 0\.009",
    ),
    "weights": (
        lambda model: model.get_layer("head").set_weights([np.full((8, 1), 2.0), np.ones(1)]),
        r"copy of sequential/head/kernel: rank 1 has .*, rank 0 has values that sum to 16\.0",
    ),
}


@pytest.mark.parametrize("what", PARTED)
def test_a_variable_that_one_rank_assigns_is_found_before_the_next_epoch(what):
    act, match = PARTED[what]

    def program(rank):
        distribute((2, 1))
        model = build()
        fit(model, callbacks=[between_epochs(lambda: act(model) if rank == 0 else None)])

    assert_fails_everywhere(program, 2, error=RankMismatchError, match=match)


def test_ranks_that_stay_together_are_left_alone():
    """Every kind of state, and all that may be drawn and assigned on all ranks."""

    def program(rank, mesh):
        distribute(mesh, KERNEL)
        model = build(dropout=0.5)
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])

        def act():
            torch.rand(1)
            model.optimizer.learning_rate.assign(0.01)

        options = {"callbacks": [between_epochs(act)], "shuffle": True}
        return fit(model, validation_split=0.25, **options).history["loss"]

    for mesh in [(1, 2), (2, 1)]:
        first, second = run_ranks(program, 2, mesh)
        assert first == second


def on_a_thread(work):
    """The error of `work` on a separate thread, None if there is none."""
    raised = []

    def run():
        try:
            work()
        except Exception as error:  # noqa: BLE001 - it is compared
            raised.append(error)

    thread = threading.Thread(target=run, name="mine")
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_a_thread_without_the_order_of_the_others_may_not_assign():
    def program(rank):
        distribution = distribute((2, 1))
        model = build()
        rate = model.optimizer.learning_rate
        dropout = keras.layers.Dropout(0.5, seed=3)

        def inside():
            with distribution.scope():
                rate.assign(0.01)

        refused = on_a_thread(lambda: rate.assign(0.5))
        assert isinstance(refused, CallProblem)
        assert "learning_rate" in str(refused)
        assert "async_safe" in str(refused)
        # What a pipeline draws counts the draws, whenever they are made.
        assert on_a_thread(lambda: dropout(X, training=True)) is None
        assert on_a_thread(inside) is None
        return float(rate)

    np.testing.assert_allclose(run_ranks(program, 2), [0.01, 0.01])


def test_uninstall_waits_until_fit_has_returned():
    def program(rank):
        distribute((2, 1))
        model = build()
        callbacks = keras.callbacks.LambdaCallback
        for hook in ("on_train_batch_end", "on_epoch_end", "on_test_begin"):
            with pytest.raises(
                CallProblem, match=r"uninstall.*'sequential.*when that has returned"
            ):
                fit(
                    model,
                    validation_split=0.5,
                    callbacks=[callbacks(**{hook: lambda *_, **__: shardcore.uninstall()})],
                )
        fit(model)
        shardcore.uninstall()
        return shardcore.status().installed

    assert run_ranks(program, 2) == [False, False]
