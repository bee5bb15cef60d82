"""A captured step has the numbers of the eager one."""

import logging

import keras
import numpy as np
import pytest
import torch
from absl import logging as absl_logging

import shardcore
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.capture.steps import (
    STEPS,
    Spy,
    assert_equal,
    batches,
    begin,
    calls,
    cnn,
    compiled,
    decoder,
    is_real,
    lstm,
    messages,
    mlp,
    plain_mlp,
    reasons,
    scaled,
    trained,
)

CASES = [
    (mlp, None),
    (mlp, (2, 1)),
    (mlp, (1, 2)),
    (scaled, (2, 1)),
    (cnn, (2, 1)),
    (decoder, (1, 2)),
    (lstm, None),
]


@pytest.mark.parametrize(("build", "shape"), CASES)
def test_captured_steps_have_the_numbers_of_eager_ones(build, shape):
    def program(rank):
        begin(shape)
        data = batches(build)
        return [trained(compiled(build, jit), data) for jit in (False, "auto")]

    for (eager, eager_runs), (captured, runs) in run_ranks(program, 1 if shape is None else 2):
        assert_equal(captured, eager)
        assert (eager_runs, runs) == (STEPS, 2)  # both are recorded


def warmed_up():
    schedule = keras.optimizers.schedules.CosineDecay(0.01, 20, warmup_target=0.1, warmup_steps=6)
    return keras.optimizers.Adam(schedule)


WAYS = {
    "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "averaged": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "warmed up": warmed_up,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_branches_on_a_count_is_captured_for_each_branch(way):
    def program(rank):
        begin(None)
        data = batches(plain_mlp, 16)
        return [trained(compiled(plain_mlp, jit, WAYS[way]()), data) for jit in (False, "auto")]

    (((eager, _), (captured, runs)),) = run_ranks(program, 1)
    assert_equal(captured, eager)
    assert runs == 4  # two of each way


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize(
    ("jit", "model_class", "runs"),
    [("auto", None, 2), (False, None, 4), ("auto", OwnStep, 2)],
)
def test_steps_are_captured_where_compile_says_so(jit, model_class, runs):
    program = run_ranks(lambda rank: reasons(Spy, jit, model_class=model_class), 1)
    assert program == [([], runs)]


def test_a_step_within_a_step_is_part_of_it():
    def program(rank):
        inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        inner.compile("sgd", "mse")

        class Outer(keras.Model):
            def train_step(self, data):
                inner.train_on_batch(np.ones((4, 4), "float32"), np.ones((4, 1), "float32"))
                return super().train_step(data)

        said, runs = reasons(Spy, True, steps=6, model_class=Outer)
        return said, runs

    ((said, runs),) = run_ranks(program, 1)
    assert len(said) == 1
    assert runs == 6  # the inner model is none of the outer's


def test_a_count_that_the_step_writes_before_it_is_read_is_counted_once():
    class Counting(Spy):
        def build(self, shape):
            self.count = self.add_weight(shape=(), dtype="int32", trainable=False)

        def call(self, x):
            x = super().call(x)
            if is_real(x):
                self.count.assign(self.count + 1)
                if keras.ops.equal(self.count % 2, 1):
                    return x * 2
            return x

    def program(rank, jit):
        begin(None)
        keras.utils.set_random_seed(1)
        x = keras.Input((4,))
        model = keras.Model(x, keras.layers.Dense(1)(Counting()(x)))
        model.compile("sgd", "mse", jit_compile=jit)
        data = np.ones((4, 4), "float32"), np.ones((4, 1), "float32")
        calls.clear()
        losses = [float(model.train_on_batch(*data)) for _ in range(10)]
        return losses, int(model.layers[1].count), len(calls)

    ((losses, count, runs),) = run_ranks(program, 1, "auto")
    ((eager, counted, _),) = run_ranks(program, 1, False)
    assert (losses, count) == (eager, counted)
    assert runs == 4


def test_one_tensor_twice_is_another_batch_than_two():
    def program(rank, jit):
        begin(None)
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse", jit_compile=jit)
        clean, noisy = torch.ones(4, 4), torch.full((4, 4), 2.0)
        batches = [(clean, clean)] * 4 + [(noisy, clean)] * 4
        return [float(model.train_on_batch(*batch)) for batch in batches]

    assert run_ranks(program, 1, "auto") == run_ranks(program, 1, False)


def test_a_small_data_parallel_step_sends_gradients_and_logs_in_one_all_reduce():
    def program(rank):
        begin((2, 1))
        model, data = compiled(decoder, "auto"), batches(decoder)
        for x, y in data:
            model.train_on_batch(x, y)
        with count_collectives() as traffic:
            model.train_on_batch(*data[0])
        trainable = sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)
        return dict(traffic.calls), sum(traffic.operand_bytes.values()) - trainable

    for made, beyond in run_ranks(program, 2):
        assert made == {"all_reduce": 1}
        assert 0 < beyond <= 16  # the loss, and what was right


def test_auto_is_kept_in_a_saved_model(tmp_path):
    def program(rank):
        begin(None)
        model = compiled(mlp, "auto")
        model.train_on_batch(*batches(mlp)[0])
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras", {"Spy": Spy})
        return loaded.jit_compile == "auto" and not loaded.jit_compile

    assert run_ranks(program, 1) == [True]


def test_a_recording_runs_while_shardcore_is_installed_and_no_longer():
    def program(rank):
        begin(None)
        model, data = compiled(plain_mlp, "auto"), batches(plain_mlp, 4)
        runs = []
        for installed in (True, False, True):
            calls.clear()
            shardcore.uninstall()
            if installed:
                begin(None)
            for x, y in data:
                model.train_on_batch(x, y)
            runs.append(len(calls))
        return runs

    assert run_ranks(program, 1) == [[2, 4, 2]]


def test_fits_with_validation_and_callbacks_are_recorded_once_for_each_kind_of_batch():
    def program(rank):
        begin((2, 1))
        return fitted(False), fitted("auto")

    def fitted(jit):
        model, data = compiled(plain_mlp, jit), batches(plain_mlp, 4)
        x, y = (np.concatenate(each) for each in zip(*data, strict=True))
        found, runs = [], []
        for _ in range(3):
            calls.clear()
            callbacks = [keras.callbacks.ReduceLROnPlateau(patience=1)]
            fit = model.fit(x, y, 12, 3, 0, callbacks, validation_split=0.25)
            found += [*fit.history.values(), model.evaluate(x, y, 12, verbose=0)]
            found.append(model.predict(x, 12, verbose=0))
            runs.append(len(calls))
        return [np.asarray(each) for each in found], runs

    for (eager, _), (captured, runs) in run_ranks(program, 2):
        assert_equal(captured, eager)
        assert runs[2] == 0


# Without a parent: pytest gives the root logger handlers with streams, which no guard compares.
LOG = logging.Logger("of a layer")
LOG.addHandler(logging.NullHandler())


class AsksForALevel(Spy):
    def call(self, x):
        LOG.isEnabledFor(logging.DEBUG)
        return super().call(x)


class Logs(Spy):
    def call(self, x):
        LOG.warning("called")
        return super().call(x)


class LogsByAbsl(Spy):
    def call(self, x):
        absl_logging.warning("called")
        return super().call(x)


class MayLogByAbsl(Spy):
    """As layers of keras-hub do."""

    def call(self, x):
        if x.ndim > 2:
            absl_logging.warning("called")
        return super().call(x)


@pytest.mark.parametrize(
    ("layer", "count"), [(AsksForALevel, 0), (Logs, 1), (LogsByAbsl, 1), (MayLogByAbsl, 0)]
)
def test_a_captured_step_that_logs_says_that_it_logs_no_more(layer, count):
    def program(rank):
        begin(None)
        said = messages(logging.INFO)
        model = keras.Sequential([keras.Input((4,)), layer(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        for _ in range(5):
            model.train_on_batch(np.ones((4, 4)), np.ones((4, 1)))
        return said

    (said,) = run_ranks(program, 1)
    assert ["its log messages are not repeated" in message for message in said] == [True] * count
