"""The callback ShardedCheckpoint: a fit that was ended goes on as if nothing had happened."""

import os
import signal
import threading

import keras
import numpy as np
import pytest
from keras import callbacks, layers

import shardcore
from shardcore.testing import RankFailed, run_ranks

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 6)).astype("float32")
Y = RNG.integers(0, 4, 24)


def distribute(shape, strategy="dtensor"):
    shardcore.install(strategy)
    if shape is None:
        return
    mesh = keras.distribution.DeviceMesh(shape, ("data", "model"))
    rules = keras.distribution.LayoutMap(mesh)
    rules[".*hidden.*kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )


def build():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu", name="hidden"),
            layers.Dropout(0.3),
            layers.Dense(4, name="digits"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    return model


class Stop(callbacks.Callback):
    """Ends the fit after some steps, as a crash would."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def generator():
    """Batches without an end, in its own order."""
    rng = np.random.default_rng(4)
    while True:
        rows = rng.integers(0, len(X), 8)
        yield X[rows], Y[rows]


DATA = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 8},
    "steps per epoch": lambda: {"x": X, "y": Y, "batch_size": 6, "steps_per_epoch": 2},
    "generator": lambda: {"x": generator(), "steps_per_epoch": 3, "shuffle": False},
}


def fit(directory, data, stop=None, **options):
    model = build()
    plateau = callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=10.0)
    early = callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True)
    backup = shardcore.ShardedCheckpoint(directory, **options)
    others = [] if stop is None else [Stop(stop)]
    try:
        history = model.fit(
            **DATA[data](),
            epochs=4,
            verbose=0,
            validation_data=(X[:8], Y[:8]),
            callbacks=[backup, plateau, early, *others],
        ).history
    except KeyboardInterrupt:
        backup.finish()
        return None
    state = early.wait, early.best, plateau.wait, float(model.optimizer.learning_rate.numpy())
    return model.get_weights(), history, state


@pytest.mark.parametrize(
    ("data", "stop", "options", "ended", "resumed"),
    [
        ("arrays", 8, {"every_steps": 2}, (1, 2), (2, 1)),
        ("arrays", 7, {"every_steps": 2, "asynchronous": False}, (1, 2), None),
        ("arrays", 7, {}, None, (2, 1)),
        ("steps per epoch", 6, {"every_steps": 5}, (2, 1), (1, 2)),
        ("generator", 9, {"every_steps": 4}, (2, 1), (1, 2)),
    ],
)
def test_a_fit_that_was_ended_goes_on_at_the_next_step(
    tmp_path, data, stop, options, ended, resumed
):
    def begin(rank):
        """Runs one fit to its end and stops another; returns what the first found."""
        distribute(ended)
        undisturbed = fit(tmp_path / "other", data, resume=False, **options)
        keras.utils.clear_session()  # of the distribution too
        distribute(ended)
        fit(tmp_path / "here", data, stop, **options)
        return undisturbed

    def go_on(rank):
        distribute(resumed, "manual")
        return fit(tmp_path / "here", data, **options)

    weights, history, state = run_ranks(begin, 1 if ended is None else 2)[0]
    for found, following, after in run_ranks(go_on, 1 if resumed is None else 2):
        np.testing.assert_allclose(after, state, rtol=1e-5)
        for name, values in following.items():
            np.testing.assert_allclose(values, history[name][-len(values) :], rtol=1e-5)
        for one, other in zip(found, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_rank_that_is_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path):
    def begin(rank):
        distribute((1, 2))
        sync, calls = os.fsync, []

        def killed(descriptor):
            calls.append(descriptor)
            if rank == 1 and len(calls) == 2:  # the file of its second save
                os.kill(os.getpid(), signal.SIGKILL)
            sync(descriptor)

        os.fsync = killed
        fit(tmp_path, "arrays", every_steps=2)

    def go_on(rank):
        distribute((1, 2))
        return shardcore.latest_checkpoint(tmp_path).name, fit(tmp_path, "arrays", every_steps=2)

    with pytest.raises(RankFailed):
        run_ranks(begin, 2)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".unfinished-")]
    assert {name for name, _ in run_ranks(go_on, 2)} == {"step-00000002"}
    assert all(name.startswith("step-") for name in os.listdir(tmp_path))


class AtStep(callbacks.Callback):
    """Calls a function after a step."""

    def __init__(self, step, function):
        super().__init__()
        self.step, self.function = step, function

    def on_train_batch_end(self, batch, logs=None):
        self.step -= 1
        if not self.step:
            self.function()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    def train(rank):
        distribute((1, 2))
        later, sync = threading.Event(), os.fsync

        def slow(descriptor):
            assert later.wait(30), "the writing ended before the training went on"
            sync(descriptor)

        os.fsync = slow
        backup = shardcore.ShardedCheckpoint(tmp_path, every_steps=2, keep=1)
        model = build()
        hook = AtStep(3, later.set)  # a step after the first save
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[backup, hook])
        return sorted(os.listdir(tmp_path))

    assert run_ranks(train, 2) == [["step-00000006"]] * 2


def test_an_error_of_one_ranks_thread_is_raised_on_all_ranks(tmp_path):
    def train(rank):
        distribute((1, 2))

        def full(descriptor):
            raise OSError(28, "No space left on device")

        if rank == 1:
            os.fsync = full
        with pytest.raises(OSError, match="No space left"):
            fit(tmp_path, "arrays")
        assert shardcore.latest_checkpoint(tmp_path) is None

    run_ranks(train, 2)
    assert os.listdir(tmp_path) == []


def test_a_callback_of_the_user_is_saved_if_it_has_a_state(tmp_path):
    class Counter(callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.epochs, self.seen = 0, np.zeros(2)

        def on_epoch_end(self, epoch, logs=None):
            self.epochs, self.seen = self.epochs + 1, self.seen + 1

        def state_dict(self):
            return {"epochs": self.epochs, "seen": self.seen}

        def load_state_dict(self, state):
            self.epochs, self.seen = state["epochs"], state["seen"]

    def train(rank, epochs):
        distribute((1, 2))
        counter = Counter()
        backup = shardcore.ShardedCheckpoint(tmp_path)
        model = build()
        model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=[backup, counter])
        return counter.epochs, counter.seen.tolist()

    assert run_ranks(train, 2, 2) == [(2, [2.0, 2.0])] * 2
    assert run_ranks(train, 2, 3) == [(3, [3.0, 3.0])] * 2


def test_a_subclass_reads_the_results_of_each_step(tmp_path):
    """The callback itself reads none, so that steps need not compute them."""

    class Reader(shardcore.ShardedCheckpoint):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            losses.append(logs["loss"])

    def train(rank):
        distribute((2, 1))
        reader = Reader(tmp_path)
        assert isinstance(reader, shardcore.ShardedCheckpoint)
        build().fit(X, Y, batch_size=8, verbose=0, callbacks=[reader])
        return losses, build().fit(X, Y, batch_size=8, verbose=0).history["loss"]

    losses = []
    for seen, [expected] in run_ranks(train, 2):
        assert len(seen) == 3
        assert seen[-1] == pytest.approx(expected, rel=1e-5)
