"""Ranks that come apart after the first step are found; what cannot be done together is refused."""

import gc
import os
import threading
import weakref

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore import bootstrap
from shardcore.binding.files.callbacks import OneWriter
from shardcore.domain.errors import RankMismatchError, StrategyError
from shardcore.testing import run_ranks
from tests.distributed.programs import assert_fails_everywhere, distribute

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
KERNEL = {".*hidden/kernel": (None, "model")}


def build(dropout=0.0, seed=1):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, name="hidden"),
            layers.Dropout(dropout),
            layers.Dense(1, name="head"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def fit(model, **options):
    return model.fit(
        X, Y, **{"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    )


def between_epochs(act):
    """A callback that acts once, after the first epoch."""
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, _: epoch == 0 and act())


# --- what is found at the beginning of an epoch ---------------------------------------------------


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


# --- what a thread may not assign -----------------------------------------------------------------


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
        assert isinstance(refused, StrategyError)
        assert "learning_rate" in str(refused)
        assert "async_safe" in str(refused)
        # What a pipeline draws counts the draws, whenever they are made.
        assert on_a_thread(lambda: dropout(X, training=True)) is None
        assert on_a_thread(inside) is None
        return float(rate)

    np.testing.assert_allclose(run_ranks(program, 2), [0.01, 0.01])


# --- uninstall ------------------------------------------------------------------------------------


def test_uninstall_waits_until_fit_has_returned():
    def program(rank):
        distribute((2, 1))
        model = build()
        callbacks = keras.callbacks.LambdaCallback
        for hook in ("on_train_batch_end", "on_epoch_end", "on_test_begin"):
            with pytest.raises(
                StrategyError, match=r"uninstall.*'sequential.*when that has returned"
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


# --- which session --------------------------------------------------------------------------------


def test_a_model_outside_its_scope_is_in_the_session_that_it_was_built_in():
    """Two distributions of one mesh: one takes the global batch, the other a rank's own rows."""

    def program(rank):
        shardcore.install("dtensor")
        whole, own = (
            keras.distribution.DataParallel(
                keras.distribution.DeviceMesh((2,), ("data",)), auto_shard_dataset=auto
            )
            for auto in (True, False)
        )
        shapes = []
        for other, distribution in [(own, whole), (whole, own)]:
            with other.scope():
                build()
            with distribution.scope():
                model = build()
            shapes.append(model.predict(X, verbose=0).shape)
        return shapes

    assert run_ranks(program, 2) == [[(16, 1), (32, 1)]] * 2


def test_a_model_of_another_mesh_is_named():
    def program(rank):
        with distribute((2, 1), KERNEL).scope():
            model = build()
        with distribute((1, 2), KERNEL).scope():
            fit(model)

    assert_fails_everywhere(
        program, 2, error=StrategyError,
        match=r"hidden/kernel.*over mesh \(data=2, model=1\).*set is over mesh \(data=1, model=2\)",
    )  # fmt: skip


def test_a_distribution_is_freed_with_its_models():
    def program(rank):
        def use():
            distribution = distribute((2, 1))
            model = build()
            fit(model, epochs=1)
            keras.distribution.set_distribution(None)
            return weakref.ref(distribution), weakref.ref(model)

        refs = [use(), use()]
        keras.utils.clear_session()
        gc.collect()
        sessions = bootstrap.installation().binding.sessions
        return [ref() is None for pair in refs for ref in pair], len(sessions._alive)

    assert run_ranks(program, 2) == [([True] * 4, 0)] * 2


# --- files ----------------------------------------------------------------------------------------


class Unsaved(keras.layers.Layer):
    """A layer whose state cannot be written by the rank that should write, or by any."""

    fails_on = ()

    def call(self, x):
        return x

    def save_own_variables(self, store):
        if (
            keras.distribution.distribution()
            and bootstrap.installation().processes.rank in self.fails_on
        ):
            raise self.error


class LocalError(Exception):
    """No other process can make one of its message alone."""

    def __init__(self, code, message):
        super().__init__(message)


def test_a_file_that_cannot_be_written_is_one_error_on_every_rank_and_all_go_on(tmp_path):
    """Rank 0 fails before, among and after the collectives; rank 1 among them."""

    def program(rank):
        distribute((1, 2), {".*kernel": (None, "model"), "last/kernel": ("model", None)})
        x = keras.Input((4,))
        broken = Unsaved()
        h = broken(keras.layers.Dense(8)(x))
        model = keras.Model(x, keras.layers.Dense(1, name="last")(keras.layers.Dense(8)(h)))
        model.compile("sgd", "mse")
        caught = []

        def attempt(path, error, fails_on=(), save=model.save):
            broken.fails_on, broken.error = fails_on, error
            with pytest.raises(Exception) as raised:  # noqa: PT011 - it is compared
                save(path)
            notes = getattr(raised.value, "__notes__", [])
            caught.append((type(raised.value).__name__, str(raised.value), notes))
            return model.predict(X, verbose=0)

        missing = tmp_path / "no" / "such"
        attempt(missing / "a.keras", None)
        attempt(missing / "a.weights.h5", None, save=model.save_weights)
        attempt(tmp_path / "b.keras", OSError(28, "No space left"), (0,))
        attempt(tmp_path / "b.weights.h5", OSError(28, "No space"), (1,), save=model.save_weights)
        attempt(tmp_path / "c.keras", KeyError("both"), (0, 1))
        (tmp_path / "taken.keras").mkdir(exist_ok=True)
        attempt(tmp_path / "taken.keras", None)
        predicted = attempt(tmp_path / "d.keras", LocalError(1, "a message"), (0,))
        broken.fails_on = ()
        model.save(tmp_path / "good.keras")
        return caught, predicted, sorted(os.listdir(tmp_path))

    (caught, predicted, names), (others, also, _) = run_ranks(program, 2)
    # h5py puts its own words around the errno: the kind is what a program catches.
    assert [name for name, _, _ in caught] == [
        "FileNotFoundError", "FileNotFoundError", "OSError", "OSError", "KeyError",
        "IsADirectoryError", "StrategyError",
    ]  # fmt: skip
    assert [each[:2] for each in caught] == [each[:2] for each in others]
    assert "Rank 0 could not save" in caught[0][2][0]
    np.testing.assert_array_equal(predicted, also)
    assert names == ["good.keras", "taken.keras"]


def test_only_rank_0_writes_to_a_file_in_any_mode(tmp_path):
    def program(rank):
        distribute((2, 1))
        path = str(tmp_path / "log")
        files = OneWriter(bootstrap.installation().binding.sessions, keras.src.utils.file_utils)
        processes = bootstrap.installation().processes
        read = []
        for mode, content in [("w", "old"), ("r+", "NEW"), ("a", "+"), ("r+b", b"n"), ("a+", "+")]:
            before = processes.gather(None)
            with files.File(path, mode) as file:
                if "r" in mode:
                    read.append(file.read())
                    file.seek(0)
                    processes.gather(before)  # all have read
                file.write(content if rank == 0 else content * 5)
            processes.gather(None)
        with files.File(path, "r") as file:
            return [*read, file.read()]

    assert run_ranks(program, 2) == [["old", b"NEW+", "nEW++"]] * 2


# --- rules that came too late ---------------------------------------------------------------------


def test_a_rule_that_came_after_the_variable_decided_nothing_and_verify_says_so():
    def program(rank):
        distribution = distribute((1, 2), {".*head/kernel": ("model", None)})
        model = build()
        before = shardcore.verify(model)
        distribution._layout_map[".*hidden/kernel"] = (None, "model")
        late = shardcore.verify(model)
        report = shardcore.rules_report(model)
        kernel = model.get_layer("hidden").kernel
        shardcore.distribute_variable(kernel)
        after = shardcore.verify(model)
        del distribution._layout_map[".*head/kernel"]
        gone = shardcore.verify(model)
        checks = [{c.path: (c.rule, c.stale) for c in v.variables} for v in (late, after, gone)]
        return [v.ok for v in (before, late, after, gone)], checks, report, str(late)

    for ok, (late, after, gone), report, shown in run_ranks(program, 2):
        assert ok == [True, False, True, False]
        rule, stale = late["sequential/hidden/kernel"]
        assert rule is None
        assert stale.startswith("rule '.*hidden/kernel' was added after the variable was built: it")
        assert "was added after the variable was built" in " ".join(shown.split())
        assert late["sequential/head/kernel"] == (".*head/kernel", None)
        assert after["sequential/hidden/kernel"] == (".*hidden/kernel", None)
        assert "rule '.*head/kernel' was taken away" in gone["sequential/head/kernel"][1]
        assert report.matched == {"sequential/head/kernel": ".*head/kernel"}
        assert report.unused_rules == (".*hidden/kernel",)
        assert "came after the variables were built" in report.hints[".*hidden/kernel"]
        assert "sequential/hidden/kernel" in report.unmatched_paths


# --- sample weights -------------------------------------------------------------------------------


class SqueezedWeights(keras.Model):
    """Hands its loss a view of the weights, which the mask of the loss is multiplied into."""

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight[:, 0], training)

    def compute_metrics(self, x, y, y_pred, sample_weight):
        weights = keras.ops.convert_to_tensor(sample_weight)
        return {"weight": keras.ops.sum(weights)}


def test_an_array_of_weights_is_not_changed_through_a_view():
    def program(rank, mesh):
        if mesh:
            distribute(mesh)
        keras.utils.set_random_seed(1)
        x = keras.Input((3,))
        h = keras.layers.Embedding(5, 4, mask_zero=True)(x)
        model = SqueezedWeights(x, keras.layers.Dense(1)(h))
        model.compile("sgd", "mse")
        words = np.array([[1, 2, 0], [3, 0, 0]] * 4)
        weights = np.linspace(0.5, 2.0, 24).reshape(8, 1, 3).astype("float32")
        logs = model.train_on_batch(words, np.ones((8, 3, 1)), weights, return_dict=True)
        return float(logs["weight"]), model.get_weights()

    ((expected, trained),) = run_ranks(program, 1, None)
    for found, weights in run_ranks(program, 2, (2, 1)):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        for mine, theirs in zip(weights, trained, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-6)
