"""Decisions that all ranks share, and a rank that decides alone to stop: it is named."""

import threading
import time

import keras
import numpy as np
import pytest

import shardcore
from shardcore.domain.errors import ArgumentProblem, RankMismatchError
from shardcore.testing import RankFailed, run_ranks
from tests.distributed.programs import distribute

X, Y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")


def test_the_ranks_agree():
    def program(rank):
        shardcore.install()
        before = shardcore.agree(rank == 1)  # before a distribution is set
        distribute((1, 2))
        ways = [shardcore.agree(rank == 1, how) for how in ("any", "all")]
        with pytest.raises(ArgumentProblem, match=r'"rank 0" for agree\(how\), got \'most\''):
            shardcore.agree(True, "most")
        return before, *ways, shardcore.agree({"step": rank}, "rank 0")

    assert run_ranks(program, 2, init=False) == [(True, True, False, {"step": 0})] * 2


def test_a_value_that_cannot_be_pickled_is_refused_on_all_ranks():
    def program(rank):
        distribute((1, 2))
        with pytest.raises(
            ArgumentProblem, match=r"for agree\(..., 'rank 0'\), got one of type 'lo"
        ):
            shardcore.agree(threading.Lock(), "rank 0")
        return shardcore.agree(f"rank {rank}", "rank 0")

    assert run_ranks(program, 2, init=False) == ["rank 0"] * 2


def test_ranks_that_agree_in_other_ways_get_an_error():
    def program(rank):
        distribute((1, 2))
        with pytest.raises(RankMismatchError, match=r"agree\(..., '(any|all)'\)"):
            shardcore.agree(True, ("any", "all")[rank])

    run_ranks(program, 2)


class Stops(keras.callbacks.Callback):
    """Stops the training, in a batch or at the end of an epoch."""

    def __init__(self, hook, decide):
        super().__init__()
        setattr(self, hook, lambda *_, **__: setattr(self.model, "stop_training", decide()))


def stopped(rank, hook, decide, **options):
    distribute((2, 1))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)], name="net")
    model.compile("sgd", "mse")
    callbacks = [Stops(hook, lambda: decide(rank))]
    return model.fit(X, Y, batch_size=4, epochs=4, verbose=0, callbacks=callbacks, **options)


HOOKS = ("on_train_batch_end", "on_epoch_end")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_rank_that_stops_alone_is_named(hook):
    """The other one may wait in a collective of the next step, which only an end breaks."""

    def program(rank):
        stopped(rank, hook, lambda rank: rank == 1, validation_data=(X, Y))

    began = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_ranks(program, 2, timeout=40)
    assert time.monotonic() - began < 20
    message = str(failed.value)
    assert "ank 1 is at the end of fit() of model 'net', as stop_training is True" in message
    assert "shardcore.agree" in message


@pytest.mark.parametrize("hook", HOOKS)
def test_ranks_that_stop_together_end(hook):
    def program(rank):
        history = stopped(rank, hook, lambda rank: shardcore.agree(rank == 1))
        return len(history.epoch)

    assert run_ranks(program, 2, timeout=40) == [1, 1]
