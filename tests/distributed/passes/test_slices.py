"""Steps with large outputs: they run in slices, from the first one on, with the same numbers."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import keras
import numpy as np
import pytest
from keras import layers

import shardcore
from shardcore import bootstrap
from shardcore.adapters.capture.analyses import live_bytes
from shardcore.adapters.capture.passes import slices
from shardcore.adapters.capture.running.program import RecordedProgram, TraceCapture
from shardcore.binding.capture import large_steps
from shardcore.binding.capture.cache import CacheEntry
from shardcore.domain.layouts.mesh import Mesh
from shardcore.testing import run_ranks
from tests.traces import highest

VOCABULARY, LENGTH, ROWS = 512, 16, 8
LOGITS = ROWS * LENGTH * VOCABULARY * 4
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, VOCABULARY, (3 * ROWS + 4, LENGTH)).astype(
    "int32"
)  # the last batch is half
NEXT = np.roll(TOKENS, -1, 1)


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch):
    """Slices as for outputs a thousand times as large; ranks are forked from this process."""
    monkeypatch.setattr(slices, "LARGE_VALUE", LOGITS // 8)
    monkeypatch.setattr(slices, "LEAST_ROWS", 8)
    monkeypatch.setattr(large_steps, "LARGE_VALUE", LOGITS // 8)


def language_model(loss="sparse", dropout=0.0):
    x = keras.Input((None,), dtype="int32")
    h = layers.Embedding(VOCABULARY, 16, name="tokens")(x)
    h = h + layers.Dense(16, "relu", name="hidden")(layers.Dropout(dropout, seed=3)(h))
    h = layers.LayerNormalization(name="norm")(h)
    model = keras.Model(x, layers.Dense(VOCABULARY, name="logits")(h), name="net")
    model.compile("adam", LOSSES[loss], weighted_metrics=["sparse_categorical_accuracy"])
    return model


def with_z_loss(y, logits):
    """Adds the square of the logarithm of the partition, as large language models do."""
    logits = keras.ops.cast(logits, "float32")
    total = keras.ops.logsumexp(logits, -1)
    target = keras.ops.take_along_axis(logits, keras.ops.expand_dims(y, -1), -1)[..., 0]
    return total - target + 1e-2 * total**2


def over_the_batch(y, logits):
    """Compares the rows of a batch with each other: none can be left out."""
    mine = keras.ops.max(logits, axis=(1, 2))
    return keras.ops.repeat(-keras.ops.log_softmax(mine, 0)[:, None], LENGTH, 1)


def with_a_branch(y, logits):
    """Reads its value on the host, as to look for NaN."""
    loss = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
    return loss if float(keras.ops.stop_gradient(keras.ops.mean(loss))) > 0 else 2 * loss


LOSSES = {
    "sparse": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "ignored class": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1),
    "z": with_z_loss,
    "over the batch": over_the_batch,
    "branch": with_a_branch,
}


class Watch:
    """Notes how steps ran: the programs, and steps that ran eagerly."""

    def __init__(self):
        self.programs, self.eager = [], []

    @contextmanager
    def watching(self):
        def run(program, *args, **kwargs):
            self.programs.append(program)
            return run_program(program, *args, **kwargs)

        def run_eagerly(entry, step):
            self.eager.append(entry)
            return step()

        def record(capture, step, *args):
            self.eager.append(step)
            return record_eagerly(capture, step, *args)

        run_program, record_eagerly = RecordedProgram.__call__, TraceCapture.record
        with (
            mock.patch.object(RecordedProgram, "__call__", run),
            mock.patch.object(CacheEntry, "run_eagerly", run_eagerly),
            mock.patch.object(TraceCapture, "record", record),
        ):
            yield


def train(
    rank, shape, rules=(), strategy="dtensor", policy="float32", rows=ROWS, length=LENGTH, **options
):
    """Trains under a mesh; with None, plain Keras does."""
    if shape is not None:
        shardcore.install(strategy)
    keras.config.set_dtype_policy(policy)
    if shape is not None:
        mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"))
        layout_map = keras.distribution.LayoutMap(mesh)
        for key, spec in rules:
            layout_map[key] = spec
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
        )
    keras.utils.set_random_seed(1)
    model = language_model(**options)
    watch, peaks = Watch(), []
    in_slices = slices.in_slices

    def noted(trace, slice_calls):
        sliced = in_slices(trace, slice_calls)
        peaks.append((max(live_bytes(trace)), max(live_bytes(sliced))))
        return sliced

    x, y = TOKENS.reshape(-1, length), NEXT.reshape(-1, length)
    weights = np.ones(x.shape, "float32")
    weights[:, -1] = 0
    with watch.watching(), mock.patch.object(slices, "in_slices", noted):
        logs = model.fit(x, y, rows, 2, verbose=0, sample_weight=weights, shuffle=False).history
        logs["evaluated"] = model.evaluate(x, y, rows, verbose=0)
    return logs, model.get_weights(), len(watch.eager), len(watch.programs), peaks


def on_ranks(shape, rules=(), **options):
    """Trains on as many ranks as the mesh has, and on one device by plain Keras."""
    (expected,) = run_ranks(partial(train, shape=None, **options), 1)
    results = run_ranks(partial(train, shape=shape, rules=rules, **options), np.prod(shape))
    return results, expected


def check(result, expected, tolerance=1e-5):
    for name, values in expected[0].items():
        np.testing.assert_allclose(result[0][name], values, rtol=tolerance, atol=1e-6, err_msg=name)
    for value, other in zip(result[1], expected[1], strict=True):
        np.testing.assert_allclose(value, other, rtol=10 * tolerance, atol=10 * tolerance)


GATHERED = [(".*kernel", (None, "batch")), (".*embeddings", ("batch", None))]
COLUMNS = [(".*logits/kernel", (None, "model")), (".*logits/bias", ("model",))]


@pytest.mark.parametrize("loss", ["sparse", "ignored class", "z"])
def test_a_fit_holds_slices_and_has_the_numbers_of_eager_steps(loss):
    (result,), expected = on_ranks((1, 1), loss=loss)
    check(result, expected)
    _, _, eager, programs, peaks = result
    assert eager == 0  # also the first steps, and those of the half batch
    assert programs == 2 * 4 + 4
    assert len(peaks) >= 4
    assert all(sliced < 0.5 * whole for whole, sliced in peaks)


@pytest.mark.parametrize(
    ("strategy", "shape", "rules"),
    [("manual", (2, 1), ()), ("manual", (2, 1), GATHERED), ("dtensor", (1, 2), COLUMNS)],
)
def test_on_a_mesh_no_step_runs_eagerly(strategy, shape, rules):
    results, expected = on_ranks(shape, rules, strategy=strategy)
    for result in results:
        check(result, expected)
        assert result[2] == 0
        if rules is not COLUMNS:
            assert all(sliced < 0.8 * whole for whole, sliced in result[4])


def test_no_step_of_a_fully_sharded_model_runs_eagerly_where_a_rank_has_fewer_rows_or_none():
    results, expected = on_ranks((2, 1), GATHERED, rows=9)  # 5 and 4, at last 1 and 0
    for result in results:
        check(result, expected)
        assert result[2] == 0
        large = [sliced / whole for whole, sliced in result[4] if whole > 0.75 * LOGITS]
        assert len(large) == 6  # not those of the last batch
        assert max(large) < 0.4


def test_the_rows_of_each_example_are_sliced():
    (result,), expected = on_ranks((1, 1), rows=1, length=4 * LENGTH)
    check(result, expected)
    assert all(sliced < 0.4 * whole for whole, sliced in result[4])
    (result,), expected = on_ranks((1, 1), rows=2, length=4 * LENGTH)
    check(result, expected)
    assert all(sliced < 0.4 * whole for whole, sliced in result[4][:2]), result[4]


def test_dropout_draws_the_numbers_of_eager_steps():
    (result,), expected = on_ranks((1, 1), dropout=0.5)
    check(result, expected)
    assert result[2] == 0


def test_half_precision_is_summed_in_float32():
    (exact,) = run_ranks(partial(train, shape=None), 1)
    (result,), expected = on_ranks((1, 1), policy="mixed_bfloat16")
    check(result, expected, tolerance=2e-3)
    # Not farther from float32 than the step with all rows at once is.
    errors = [abs(logs["loss"][1] - exact[0]["loss"][1]) for logs in (result[0], expected[0])]
    assert errors[0] <= errors[1] + 1e-4
    assert all(sliced < 0.5 * whole for whole, sliced in result[4])


def test_a_loss_over_the_rows_is_not_sliced():
    (result,), expected = on_ranks((1, 1), loss="over the batch")
    check(result, expected)
    assert any(sliced == whole for whole, sliced in result[4])


def test_a_step_that_needs_values_holds_its_outputs_whole():
    (result,), expected = on_ranks((1, 1), loss="branch")
    check(result, expected)
    assert result[2] > 0


BATCH = TOKENS[:ROWS], NEXT[:ROWS]


def measured(_, shape, policy):
    """Returns the most bytes that a step has, with the memory of gradients that steps share."""
    shardcore.install()
    mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"))
    shardcore.plan(language_model, mesh, policy).distribute()
    model = language_model()
    for _ in range(5):
        model.train_on_batch(*BATCH)
    shared = bootstrap.installation().binding.capture._memories._made.values()
    storages = {buffer.data_ptr(): buffer.untyped_storage().nbytes() for buffer in shared}
    return sum(storages.values()) + highest(lambda: model.train_on_batch(*BATCH))


@pytest.mark.parametrize("policy", ["data_parallel", "fully_sharded"])
def test_the_estimate_of_memory_is_that_of_slices(policy):
    shape = (2, 1)
    plan = shardcore.plan(language_model, Mesh(shape, ("batch", "model")), policy)
    report = shardcore.estimate_memory(plan, language_model, BATCH)
    allocated, _ = run_ranks(partial(measured, shape=shape, policy=policy), 2)
    assert report.in_slices
    assert "its outputs in slices" in str(report)
    step = report.step_peak - report.kept - report.step["batch"]
    assert step == pytest.approx(allocated, rel=0.05)
    assert step < LOGITS


def sliced_steps(_):
    """Returns the operators that make or write a gradient of the last kernel, in each program."""
    shardcore.install("single")
    model, made, in_slices = language_model(), [], slices.in_slices

    def noted(trace, slice_calls):
        sliced = in_slices(trace, slice_calls)
        kernel = [c.name for c in sliced.calls if shapes(c, sliced) == [(16, VOCABULARY)]]
        made.append([name for name in kernel if "mm" in name or "add_" in name])
        return sliced

    def shapes(call, trace):
        return [trace.form(value).shape for value in call.results]

    with mock.patch.object(slices, "in_slices", noted):
        model.train_on_batch(*BATCH)
    return made


def test_a_slice_adds_its_part_of_a_gradient_as_it_computes_it():
    ((program,),) = run_ranks(sliced_steps, 1)
    assert program == ["aten.mm.default", *["aten.addmm_.default"] * (len(program) - 1)]
    assert len(program) >= 4
