"""The callback StepStats: figures of steps in the logs, beside counts by the test itself."""

import csv
import time

import keras
import numpy as np
import pytest

import shardcore
from shardcore.binding.capture.python_state.guard import PythonGuard
from shardcore.domain.capture import State
from shardcore.domain.cost.machine import Machine, Speed
from shardcore.domain.cost.step_figures import STEP_FIGURES
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.programs import STRATEGY, distribute

ROWS, BATCH, WORDS, WIDTH, CLASSES = 244, 8, 5, 16, 4
STEPS = -(-ROWS // BATCH)  # the last one has fewer rows
RNG = np.random.default_rng(0)
TOKENS, FEATURES = RNG.integers(0, 12, (ROWS, WORDS)), RNG.normal(size=(ROWS, 6)).astype("float32")
LABELS = RNG.integers(0, CLASSES, ROWS)
FIGURES = {"samples_per_second", "step_ms", "data_wait", "peak_memory_mib", "collective_mib"}


def compiled(hidden):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([*hidden, keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return model


def of_tokens():
    layers = keras.layers
    words = keras.Input((WORDS,), dtype="int32")
    return compiled([words, layers.Embedding(12, 8), layers.Flatten(), layers.Dense(WIDTH)])


def of_features():
    return compiled([keras.Input((6,)), keras.layers.Dense(WIDTH)])


def fit(model, x, *callbacks, epochs=3, **options):
    data = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    return model.fit(x, LABELS, epochs=epochs, callbacks=list(callbacks), **data | options).history


def begin(ranks, strategy):
    if ranks == 1:
        shardcore.install("single")
    else:
        distribute((2, 1), strategy=strategy)


class Watch(keras.callbacks.Callback):
    """Times each epoch, and collects the logs of steps."""

    def __init__(self):
        super().__init__()
        self.seconds, self.logs = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self._began)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, STRATEGY), (2, "manual")])
def test_figures_are_those_of_an_independent_count(tmp_path, ranks, strategy):
    def program(rank):
        begin(ranks, strategy)
        model, watch = of_tokens(), Watch()
        log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
        history = fit(model, TOKENS, log, watch, shardcore.StepStats(every=4))
        return history, watch.seconds, watch.logs, sum(w.numpy().nbytes for w in model.weights)

    results = run_ranks(program, ranks)
    for history, seconds, logs, gradient_bytes in results:
        assert history.keys() == FIGURES | {"loss", "tokens_per_second"}
        for epoch, elapsed in enumerate(seconds):
            figures = {name: values[epoch] for name, values in history.items()}
            assert all(type(value) is float for value in figures.values())
            measured = figures["step_ms"] / 1000 * STEPS
            assert 0.5 * elapsed < measured < elapsed
            assert figures["samples_per_second"] * measured == pytest.approx(ROWS)
            assert figures["tokens_per_second"] * measured == pytest.approx(ROWS * WORDS)
            moved = figures["collective_mib"] * 2**20
            # Watch reads the loss of each step: its sum, of four bytes, is reduced too.
            assert moved == pytest.approx(gradient_bytes + 4 if ranks == 2 else 0)
            assert 0 < figures["data_wait"] < 1
            assert 50 < figures["peak_memory_mib"] < 10_000
        assert {frozenset(step) for step in logs} == {frozenset(history)}
        assert frozenset(history) - {"loss"} <= set(STEP_FIGURES)
        assert len({step["step_ms"] for step in logs}) == 1 + len(seconds) * (STEPS // 4)
    with open(tmp_path / "log.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    of_rank_0 = results[0][0]["samples_per_second"]
    assert [float(line["samples_per_second"]) for line in lines] == of_rank_0


def test_the_wait_for_slow_data_is_seen():
    def slow():
        for at in range(0, ROWS, BATCH):
            time.sleep(0.02)
            yield TOKENS[at : at + BATCH], LABELS[at : at + BATCH]

    def program(rank):
        begin(2, STRATEGY)
        model = of_tokens()
        options = {"steps_per_epoch": STEPS, "shuffle": False, "verbose": 0}
        logs = model.fit(slow(), callbacks=[shardcore.StepStats()], **options).history
        return logs["data_wait"][0], logs["step_ms"][0]

    for share, step in run_ranks(program, 2):
        assert share * step >= 20  # milliseconds that each batch sleeps
        assert share < 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fit_stays_captured_and_compares_nothing_between_steps(ranks):
    def program(rank):
        compared, change = [], PythonGuard.change

        def counted(guard):
            compared.append(guard)
            return change(guard)

        PythonGuard.change = counted
        begin(ranks, STRATEGY)
        counts = []
        for callbacks in ([], [shardcore.StepStats(every=2)], [Watch()]):
            model = of_features()
            compared.clear()
            with count_collectives() as traffic:
                fit(model, FEATURES, *callbacks)
            states = {entry.progress.state for entry in _entries(model)}
            counts.append((len(compared), sum(traffic.calls.values()), State.CAPTURED in states))
        return counts

    for without, with_stats, watched in run_ranks(program, ranks):
        assert with_stats == without
        assert with_stats[2]
        # Code of a user runs between its steps. A thread of another test is code of a user too.
        assert watched[0] >= without[0]


def _entries(model):
    return model.train_function.captured._entries.values()


def test_one_rank_may_have_it_alone():
    def program(rank):
        begin(2, STRATEGY)
        callbacks = [shardcore.StepStats()] if rank == 0 else []
        return fit(of_features(), FEATURES, *callbacks)["loss"]

    first, second = run_ranks(program, 2)
    assert first == second


DECIDE = {
    "EarlyStopping": {},
    "ReduceLROnPlateau": {},
    "ModelCheckpoint": {"filepath": "best.keras", "save_best_only": True},
}


@pytest.mark.parametrize("name", DECIDE)
def test_a_callback_that_decides_by_a_figure_is_an_error_on_all_ranks(name):
    def program(rank, ranks):
        begin(ranks, STRATEGY)
        decides = getattr(keras.callbacks, name)
        by_figure = decides(monitor="samples_per_second", mode="max", **DECIDE[name])
        callbacks = [by_figure, shardcore.StepStats()]
        if ranks == 1:
            return len(fit(of_features(), FEATURES, *callbacks)["loss"])
        expected = rf"{name}\(monitor='samples_per_second'\) would decide.* Monitor a loss"
        with pytest.raises(shardcore.errors.CallProblem, match=expected):
            fit(of_features(), FEATURES, *callbacks)
        return 0

    assert run_ranks(program, 2, 2) == [0, 0]
    if name == "EarlyStopping":  # one device may: nothing differs from it
        assert run_ranks(program, 1, 1)[0] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_use_of_the_peak_is_that_of_the_products_of_a_rank(ranks):
    """The first layer computes two products, the second one three: its input has a gradient."""
    machine = Machine("mine", 2, 10**9, {"float32": Speed(1e12, 1e10)})

    def program(rank):
        begin(ranks, STRATEGY)
        model = of_features()
        return fit(model, FEATURES, shardcore.StepStats(machine=machine))

    expected = 2 * ROWS * (2 * 6 * WIDTH + 3 * WIDTH * CLASSES) / ranks
    for history in run_ranks(program, ranks):
        for use, step_ms in zip(history["flops_utilization"], history["step_ms"], strict=True):
            flops = use * step_ms / 1000 * STEPS * 1e12
            assert flops == pytest.approx(expected)  # of eager steps, and of captured ones


class Ends(keras.callbacks.Callback):
    """Collects the logs at the end of an evaluate."""

    def on_test_end(self, logs=None):
        self.logs = dict(logs)


def test_evaluate_reports_its_own_steps_and_validation_none():
    def program(rank):
        begin(2, STRATEGY)
        model, ends, stats = of_features(), Ends(), shardcore.StepStats()
        history = fit(model, FEATURES, ends, stats, validation_data=(FEATURES, LABELS))
        in_fit = ends.logs
        began = time.perf_counter()
        data = {"batch_size": BATCH, "verbose": 0, "return_dict": True}
        results = model.evaluate(FEATURES, LABELS, callbacks=[stats, ends], **data)
        return history, in_fit, results, ends.logs, time.perf_counter() - began

    for history, in_fit, results, logs, elapsed in run_ranks(program, 2):
        assert history.keys() == FIGURES | {"loss", "val_loss"}
        assert in_fit.keys() == results.keys() == {"loss"}
        assert logs.keys() == FIGURES | {"loss"}
        assert logs["samples_per_second"] > ROWS / elapsed
        assert logs["collective_mib"] == 0  # its loss is reduced at the end


def test_the_figures_leave_a_validation_out():
    class SlowValidation(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            time.sleep(1)

    def program(rank):
        begin(1, STRATEGY)
        validation = {"validation_data": (FEATURES, LABELS)}
        return fit(of_features(), FEATURES, SlowValidation(), shardcore.StepStats(), **validation)

    (history,) = run_ranks(program, 1)
    assert history["step_ms"][-1] * STEPS < 1000


@pytest.fixture
def _single():
    """Installs shardcore in this process, and not in ranks that are forked from it later."""
    shardcore.install("single")
    yield
    shardcore.uninstall()


@pytest.mark.parametrize("every", [0, -1, True, 2.5, "5", None])
@pytest.mark.usefixtures("_single")
def test_a_wrong_window_is_an_error(every):
    with pytest.raises(shardcore.errors.ArgumentProblem, match=r"number.*StepStats\(every\)"):
        shardcore.StepStats(every=every)


@pytest.mark.usefixtures("_single")
def test_wrong_uses_are_errors():
    shardcore.uninstall()
    with pytest.raises(shardcore.errors.EnvironmentProblem, match="install"):
        shardcore.StepStats()
    shardcore.install("single")
    with pytest.raises(shardcore.errors.MachineError, match="No machine 'abacus'"):
        shardcore.StepStats(machine="abacus")
    with pytest.raises(shardcore.errors.CallProblem, match=r"fit\(\) and evaluate"):
        shardcore.StepStats().on_train_begin()
