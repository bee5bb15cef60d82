"""A batch that is drawn while the step before it runs is the batch that plain Keras draws."""

import warnings

import keras
import numpy as np
import pytest
import torch

from shardcore.testing import RankFailed, run_ranks
from tests.distributed.data.batches import RULES, X, Y, model, numbers
from tests.distributed.programs import assert_close, distribute

MESHES = [(1, 1), (2, 1), (1, 2)]


class Drawn(keras.utils.PyDataset):
    """Seven batches, and a list of those that were drawn."""

    def __init__(self, error_at=None, scale=1.0):
        super().__init__()
        self.numbers, self.error_at, self.scale = [], error_at, scale

    def __len__(self):
        return 7

    def __getitem__(self, index):
        self.numbers.append(index)
        if index == self.error_at:
            raise LookupError(f"batch {index} cannot be read")
        return self.scale * X[2 * index : 2 * index + 2], Y[2 * index : 2 * index + 2]


def generator(dataset):
    for number in range(len(dataset)):
        yield dataset[number]


class FromGenerator(torch.utils.data.Dataset):
    """Rows with noise from torch's generator."""

    def __len__(self):
        return 14

    def __getitem__(self, index):
        return torch.as_tensor(X[index]) + torch.rand(1), torch.as_tensor(Y[index])


class Harder(keras.callbacks.Callback):
    """Changes what the data are after each batch."""

    def __init__(self, dataset):
        super().__init__()
        self.dataset = dataset

    def on_train_batch_end(self, batch, logs=None):
        self.dataset.scale *= 1.5


def fits(dataset, batches):
    """The arguments of fits that draw from `dataset`, from `batches`, or from arrays."""
    arrays = {"x": X, "y": Y, "batch_size": 4, "epochs": 2}
    yield "order of rows", arrays
    yield "order in a batch", arrays | {"shuffle": "batch"}
    yield "validation", arrays | {"validation_data": (X, Y), "validation_batch_size": 3}
    yield "dataset", {"x": dataset, "epochs": 2, "shuffle": True}
    yield "known epochs", {"x": batches, "steps_per_epoch": 3, "epochs": 2, "shuffle": False}
    yield "one epoch", {"x": generator(dataset), "shuffle": False}
    yield "changed", {"x": dataset, "epochs": 2, "callbacks": [Harder(dataset)]}
    loader = torch.utils.data.DataLoader(FromGenerator(), batch_size=4, shuffle=True)
    yield "noise", {"x": loader, "epochs": 2, "shuffle": False}


def fit_all(rank, mesh):
    warnings.filterwarnings("ignore", "Your input ran out of data")
    if mesh:
        distribute(mesh, RULES)
    values, orders = {}, {}
    dataset = Drawn()
    batches = generator(dataset)
    for name, how in fits(dataset, batches):
        keras.utils.set_random_seed(5)
        dataset.numbers.clear()
        trained = model()
        history = trained.fit(**how, verbose=0)
        values |= {f"{name}: {key}": value for key, value in numbers(history, trained).items()}
        values[f"{name}: torch's generator"] = torch.rand(1)
        values[f"{name}: predicted"] = trained.predict(X, batch_size=3, verbose=0)
        orders[name] = list(dataset.numbers)
    return values, orders


def test_batches_that_are_drawn_ahead_are_those_of_plain_keras():
    ((expected, expected_orders),) = run_ranks(fit_all, 1, None)
    for mesh in MESHES:
        found = run_ranks(fit_all, mesh[0] * mesh[1], mesh)
        assert_close([values for values, _ in found], expected)
        assert [orders for _, orders in found] == [expected_orders] * len(found)


def end_early(rank, mesh, callbacks, dataset):
    """Returns the batches that a fit drew, its steps, and how it failed."""
    distribute(mesh, RULES)
    trained = model()
    trained.fit(np.zeros_like(X), Y, verbose=0)
    keras.utils.set_random_seed(1)
    try:
        trained.fit(dataset, shuffle=False, verbose=0, callbacks=callbacks)
    except LookupError as error:
        return dataset.numbers, int(trained.optimizer.iterations), str(error)
    return dataset.numbers, int(trained.optimizer.iterations), ""


@pytest.mark.parametrize("mesh", MESHES)
def test_one_batch_is_drawn_before_the_callbacks_of_a_step(mesh):
    ranks = mesh[0] * mesh[1]
    ends = [keras.callbacks.TerminateOnNaN()]
    for numbers_of_rank, _, _ in run_ranks(end_early, ranks, mesh, ends, Drawn(scale=np.nan)):
        assert numbers_of_rank == [0, 1]  # one step; plain Keras has drawn one batch
    for numbers_of_rank, steps, error in run_ranks(end_early, ranks, mesh, [], Drawn(error_at=2)):
        assert (numbers_of_rank, steps - 1) == ([0, 1, 2], 2)
        assert error == "batch 2 cannot be read"


class Watches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


def watch_on_rank_0(rank):
    callbacks = [keras.callbacks.TerminateOnNaN(), *([Watches()] if rank == 0 else [])]
    return end_early(rank, (2, 1), callbacks, Drawn(scale=np.nan))


def test_a_callback_of_one_rank_keeps_all_from_drawing_ahead():
    assert [numbers_of_rank for numbers_of_rank, *_ in run_ranks(watch_on_rank_0, 2)] == [[0], [0]]


def fail_on_rank_1(rank, folder):
    distribute((2, 1), RULES)
    dataset = Drawn(error_at=2 if rank == 1 else None)
    path = folder / "model.weights.h5"
    saver = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=1)
    model().fit(generator(dataset), shuffle=False, verbose=0, callbacks=[saver])


def test_an_error_of_the_data_of_one_rank_is_the_first_of_all(tmp_path):
    with pytest.raises(RankFailed, match=r"^rank 1 failed:\n(?s:.*)batch 2 cannot be read"):
        run_ranks(fail_on_rank_1, 2, tmp_path)
