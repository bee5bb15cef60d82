"""Batches from whatever Keras takes them from: the whole of them on every process, or its rows."""

import keras
import numpy as np
import pandas
import pytest
import torch

from shardcore.testing import run_ranks
from tests.distributed.data.batches import EXTRA, RULES, X, Y, batches_of, model, numbers
from tests.distributed.programs import assert_close, at_place, distribute


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        rows = slice(7 * index, 7 * index + 7)
        return X[rows], Y[rows]


def generator():
    for start in (0, 7):
        yield X[start : start + 7], Y[start : start + 7]


def loader(**how):
    dataset = torch.utils.data.TensorDataset(torch.as_tensor(X), torch.as_tensor(Y))
    return torch.utils.data.DataLoader(dataset, batch_size=7, **how)


def shuffled():
    """A loader that draws the order of each epoch from a generator."""
    return loader(shuffle=True, generator=torch.Generator().manual_seed(3))


SOURCES = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 7},
    "tensors": lambda: {"x": torch.as_tensor(X), "y": torch.as_tensor(Y), "batch_size": 7},
    "loader": lambda: {"x": loader(), "shuffle": False},
    "shuffled": lambda: {"x": shuffled(), "shuffle": False, "epochs": 2},
    "dataset": lambda: {"x": Batches()},
    "generator": lambda: {"x": generator(), "steps_per_epoch": 2, "shuffle": False},
}


def fit_each_source(rank, mesh):
    values = {}
    if mesh:
        distribute(mesh, RULES)
    for name, source in SOURCES.items():
        trained = model()
        history = trained.fit(**source(), verbose=0)
        values |= {f"{name}: {key}": value for key, value in numbers(history, trained).items()}
        # An iterator over a loader draws a seed from it, and Keras makes one more than it reads.
        values[f"{name}: torch's generator"] = torch.rand(1)
    return values


def test_the_whole_batch_on_every_process_from_any_source():
    (reference,) = run_ranks(fit_each_source, 1, None)
    assert_close(run_ranks(fit_each_source, 4, (2, 2)), reference)


def own_rows(rank, mesh, inputs, cuts):
    """Steps of global batches, of which each process brings rows: `cuts` between the shards."""
    if mesh:
        distribute(mesh, RULES, auto_shard_dataset=False)
    trained = model(inputs)
    losses = []
    for start in (0, 7):
        rows = slice(start, start + 7)
        if mesh:
            bounds = [start, *(start + cut for cut in cuts), start + 7]
            shard = at_place(mesh, rank)[0]
            rows = slice(bounds[shard], bounds[shard + 1])
        x = {
            "one": X[rows],
            "dict": {"x": X[rows], "extra": EXTRA[rows]},
            "tuple": (X[rows], EXTRA[rows]),
        }[inputs]
        losses.append(trained.train_on_batch(x, Y[rows]))
    losses.append(trained.test_on_batch(x, Y[rows]))
    predictions = trained.predict_on_batch(x)
    weights = {f"weight {i}": value for i, value in enumerate(trained.get_weights())}
    return {"losses": losses, "predictions": predictions, **weights}


@pytest.mark.parametrize(
    ("mesh", "inputs", "cuts"),
    [
        ((2, 1), "one", (4,)),  # as torch.chunk cuts 7 rows
        ((2, 2), "dict", (4,)),
        ((2, 1), "tuple", (2,)),
        ((4, 1), "one", (1, 2, 6)),
    ],
)
def test_each_process_brings_its_own_rows(mesh, inputs, cuts):
    (reference,) = run_ranks(own_rows, 1, None, inputs, None)
    assert_close(run_ranks(own_rows, mesh[0] * mesh[1], mesh, inputs, cuts), reference)


class Recorded(np.ndarray):
    """An array that records which rows were read, as a file that is mapped would be."""

    read = ()

    def __getitem__(self, index):
        if isinstance(index, list):
            Recorded.read = (*Recorded.read, *index)
        return super().__getitem__(index)


def test_a_rank_reads_its_own_rows_of_arrays():
    def program(rank, mesh):
        if mesh:
            distribute(mesh, RULES)
        trained = model()
        recorded = X.copy().view(Recorded)
        history = trained.fit(recorded, Y, batch_size=4, epochs=2, verbose=0)
        by_fit, Recorded.read = Recorded.read, ()
        values = numbers(history, trained)
        values["predictions"] = trained.predict(recorded, batch_size=4, verbose=0)
        return values, by_fit, Recorded.read

    ((reference, *_),) = run_ranks(program, 1, None)
    results = run_ranks(program, 2, (2, 1))
    assert_close([values for values, *_ in results], reference)
    for _, by_fit, by_predict in results:
        # Of 14 rows 7 an epoch. The first batch is looked at once more by Keras, to build metrics,
        # and read whole once, as the ranks compare it.
        assert len(by_fit) == 2 * 7 + 2 + 4
        assert len(by_predict) == 7 + 4
    assert {*results[0][2], *results[1][2]} == set(range(14))


class RecordedFrame(pandas.DataFrame):
    """A data frame that records which rows were read."""

    read = ()

    @property
    def iloc(self):
        return RecordedRows(super().iloc)


class RecordedRows:
    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, index):
        if isinstance(index, list):
            RecordedFrame.read = (*RecordedFrame.read, *index)
        return self.rows[index]


def test_data_frames_and_series_of_which_a_rank_reads_its_own_rows():
    def program(rank, mesh):
        if mesh:
            distribute(mesh, RULES)
        given = {"x": RecordedFrame(X), "extra": pandas.DataFrame(EXTRA.astype("float64"))}
        data = {"y": pandas.DataFrame(Y), "sample_weight": pandas.Series(np.linspace(0.5, 2, 14))}
        trained = model("dict")
        values = numbers(trained.fit(given, **data, batch_size=4, epochs=2, verbose=0), trained)
        read = RecordedFrame.read
        values["evaluated"] = trained.evaluate(given, **data, batch_size=4, verbose=0)
        values["predicted"] = trained.predict(given, batch_size=4, verbose=0)
        single = model()
        single.fit(pandas.DataFrame(X), pandas.Series(Y[:, 0]), validation_split=0.3, verbose=0)
        values["of one column"] = single.get_weights()[0]
        return values, len(read)

    ((reference, _),) = run_ranks(program, 1, None)
    results = run_ranks(program, 2, (2, 1))
    assert_close([values for values, _ in results], reference)
    assert {read for _, read in results} == {2 * 7 + 2 + 4}  # as of arrays, above


def test_own_rows_of_a_data_frame_given_to_one_step():
    def program(rank, mesh):
        rows = slice(0, 7)
        if mesh:
            distribute(mesh, RULES, auto_shard_dataset=False)
            rows = slice(0, 4) if rank == 0 else slice(4, 7)
        return {"predicted": model().predict_on_batch(pandas.DataFrame(X[rows]))}

    (reference,) = run_ranks(program, 1, None)
    assert_close(run_ranks(program, 2, (2, 1)), reference)


class Scaled(keras.utils.PyDataset):
    """Batches that a layer with variables has scaled, on threads of the pipeline."""

    def __init__(self):
        super().__init__(workers=2)
        self.scale = keras.layers.Normalization(mean=0.5, variance=2.0)
        self.scale.build((None, 5))

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = slice(4 * index, 4 * index + 4)
        return self.scale(X[:13][rows]), Y[:13][rows]


X13, Y13, EXTRA13 = X[:13], Y[:13], EXTRA[:13]
WEIGHTS = np.linspace(0.5, 2.0, 13).astype("float32")
# Thirteen rows by four: the last batch is of one row, fewer than there are ranks.
WAYS = {
    "weights": lambda m: m.fit(X13, Y13, sample_weight=WEIGHTS, batch_size=4, verbose=0),
    "classes": lambda m: m.fit(
        X13, np.int32(Y13[:, :1] > 0), class_weight={0: 0.5, 1: 2.0}, batch_size=4, verbose=0
    ),
    "split": lambda m: m.fit(X13, Y13, validation_split=0.4, batch_size=4, verbose=0),
    "unknown": lambda m: m.fit(batches_of(X13, Y13, WEIGHTS), shuffle=False, verbose=0),
    "validated": lambda m: m.fit(
        Scaled(),
        validation_data=batches_of(X13, Y13),
        validation_steps=3,
        shuffle=False,
        verbose=0,
    ),
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_every_way_of_giving_data_with_a_last_batch_smaller_than_the_mesh():
    def program(rank, mesh):
        if mesh:
            distribute(mesh, RULES)
        values = {}
        for name, way in WAYS.items():
            trained = model()
            values |= {f"{name} {k}": v for k, v in numbers(way(trained), trained).items()}
        several = model("dict")
        given = {"x": X13, "extra": EXTRA13}
        values["evaluated"] = several.evaluate(given, Y13, batch_size=4, verbose=0)
        values["predicted"] = several.predict(given, batch_size=4, verbose=0)
        values["predicted by batches"] = several.predict(
            (({"x": X13[i : i + 4], "extra": EXTRA13[i : i + 4]},) for i in range(0, 13, 4)),
            verbose=0,
        )
        return values

    (reference,) = run_ranks(program, 1, None)
    assert_close(run_ranks(program, 2, (2, 1)), reference)
