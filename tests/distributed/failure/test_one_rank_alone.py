"""A call on one rank alone: it works if it needs no other rank, else it is an error on all."""

import os
import time

import keras
import numpy as np
import pytest
import torch
import torch.distributed as dist
from keras import layers

import shardcore
from shardcore.adapters.ranks.failure import main_thread
from shardcore.adapters.ranks.job import exchange
from shardcore.domain.errors import RankMismatchError
from shardcore.testing import RankFailed, run_ranks
from tests.distributed.programs import distribute

X, Y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")
COLUMNS = {".*kernel": (None, "model")}


def trained(shape, rules=None):
    distribute(shape, rules)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="out")], name="net")
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    return model


def alone(call, then, *, shape=(1, 2), rules=COLUMNS):
    """The error of each rank if rank 0 makes `call` before both make `then`."""

    def program(rank):
        model = trained(shape, rules)
        began = time.monotonic()
        try:
            if rank == 0:
                call(model)
            then(model)
        except RankMismatchError as error:
            return str(error), time.monotonic() - began
        return "no error", 0.0

    return run_ranks(program, 2, timeout=40)


def fit(model, **options):
    model.fit(X, Y, verbose=0, **options)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("evaluate() of model 'net'", lambda model: model.evaluate(X, Y, verbose=0)),
        ("predict() of model 'net'", lambda model: model.predict(X, verbose=0)),
        ("verify() of model 'net'", shardcore.verify),
        ("explain() of model 'net'", lambda model: shardcore.explain(model, (X, Y))),
        ("the reading of a value of shape (4, 2)", lambda model: model.get_weights()),
        ("the reading of a tensor of shape (8, 2)", lambda model: model(torch.ones(8, 4)).tolist()),
    ],
)
def test_a_call_that_needs_all_ranks_names_both_calls_and_lines(name, call):
    for message, seconds in alone(call, fit):
        assert f"rank 0 is at {name}" in message.replace("Rank", "rank")
        assert "is at fit() of model 'net' (test_one_rank_alone.py:" in message
        assert "not under `if rank == 0`" in message
        assert seconds < 15


def test_a_save_of_a_sharded_model_needs_all_ranks(tmp_path):
    path = tmp_path / "alone.weights.h5"
    for message, _ in alone(lambda model: model.save_weights(path), fit):
        assert "saving" in message
        assert "fit() of model 'net'" in message
    assert not path.exists()


def test_what_needs_no_other_rank_works_alone(tmp_path):
    def call(model):
        model.save_weights(tmp_path / "alone.weights.h5")
        model.save(tmp_path / "alone.keras")
        assert model.get_weights()[0].shape == (4, 2)
        model.summary(print_fn=lambda text: None)
        assert repr(model.layers[0].kernel)

    for message, _ in alone(call, fit, shape=(2, 1), rules=None):
        assert message == "no error"
    assert sorted(os.listdir(tmp_path)) == ["alone.keras", "alone.weights.h5"]


def test_a_write_that_fails_alone_or_together_is_the_error_of_all_that_come(tmp_path):
    def program(rank):
        model = trained((2, 1))
        failed = []
        for comes in (rank == 1, True):
            try:
                if comes:
                    model.save_weights(tmp_path / "no such folder" / "a.weights.h5")
            except OSError as error:
                failed.append(str(error.__notes__))
        fit(model)
        return len(failed), failed[-1]

    (first, reason), (second, other) = run_ranks(program, 2)
    assert (first, second) == (1, 2)
    assert "could not save" in reason
    assert "could not save" in other


def test_ranks_with_other_epochs_are_an_error_before_the_first_step():
    def program(rank):
        model = trained((2, 1))
        steps = int(model.optimizer.iterations)
        with pytest.raises(RankMismatchError, match=r"fit\(epochs=1\) .* fit\(epochs=2\)|epochs=2"):
            fit(model, epochs=1 + rank)
        return int(model.optimizer.iterations) - steps

    assert run_ranks(program, 2) == [0, 0]


def test_a_callback_that_predicts_on_one_rank_is_an_error():
    class Predicts(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if dist.get_rank() == 0:
                self.model.predict(X, verbose=0)

    def program(rank):
        model = trained((2, 1))
        try:
            fit(model, callbacks=[Predicts()])
            fit(model)
        except RankMismatchError as error:
            return str(error)
        return ""

    for message in run_ranks(program, 2):
        assert "predict() of model 'net'" in message


def test_a_rank_that_waits_in_another_collective_is_named_with_its_line(monkeypatch):
    monkeypatch.setattr(main_thread, "STAY_SECONDS", 1.0)
    monkeypatch.setattr(exchange, "_ELSEWHERE_SECONDS", 0.5)

    def program(rank):
        model = trained((1, 2), COLUMNS)
        if rank == 0:
            model.evaluate(X, Y, verbose=0)
        dist.barrier()

    where = r"waits for rank 1, which waits in another collective \(test_one_rank_alone.py:"
    with pytest.raises(RankFailed, match=where):
        run_ranks(program, 2, timeout=30)


def test_ranks_that_make_other_collectives_in_a_loop_get_an_error_that_names_both():
    def program(rank):
        trained((2, 1))
        tensor = np.ones((2 + rank, 3), "float32")
        messages = []
        for call in (shardcore.all_reduce, (shardcore.all_reduce, shardcore.all_gather)[rank]):
            with pytest.raises(RankMismatchError) as raised:
                call(tensor)
            messages.append(str(raised.value))
        return messages

    for shapes, calls in run_ranks(program, 2):
        assert "all_reduce('sum') of a tensor of (2, 3) float32" in shapes
        assert "all_reduce('sum') of a tensor of (3, 3) float32" in shapes
        assert "all_reduce('sum')" in calls
        assert "all_gather(axis=0) of a tensor of (3, 3) float32" in calls


def test_a_rank_that_has_ended_is_named():
    def program(rank):
        model = trained((1, 2), COLUMNS)
        if rank == 1:
            exchange.publish_status(exchange.store(), exchange.ENDED)
            return ""
        with pytest.raises(RankMismatchError) as raised:
            model.evaluate(X, Y, verbose=0)
        return str(raised.value)

    message, _ = run_ranks(program, 2)
    assert "waits for rank 1, which has ended" in message


def test_a_rank_that_computes_is_waited_for():
    def program(rank):
        model = trained((1, 2), COLUMNS)
        time.sleep(2 * rank)
        return model.evaluate(X, Y, verbose=0)

    first, second = run_ranks(program, 2)
    assert first == second
