"""Batches that differ between ranks, and ranks that have fewer: an error on every rank."""

import keras
import numpy as np
import pytest
import torch

from shardcore.domain.errors import LayoutError, RankMismatchError
from shardcore.testing import run_ranks
from tests.distributed.data.batches import RULES, X, Y, batches_of, model
from tests.distributed.programs import assert_fails_everywhere, distribute


def test_a_generator_that_ends_early_on_one_rank_is_an_error_on_every_rank():
    def program(rank):
        distribute((2, 1))
        model().fit(batches_of(X[: 12 - 4 * rank], Y), shuffle=False, verbose=0)

    assert_fails_everywhere(
        program,
        2,
        error=RankMismatchError,
        match="steps per epoch: rank 1 has 2, rank 0 has more than 2",
    )


class Odd(keras.utils.PyDataset):
    """Eight batches, of which one rank has one, number `odd`, with fewer rows."""

    def __init__(self, rank, odd, start=0):
        super().__init__()
        self.sizes = [3 if rank == 1 and index == odd else 4 for index in range(8)]
        self.start = start

    def __len__(self):
        return 8

    def __getitem__(self, index):
        start = self.start + index
        rows = slice(start, start + self.sizes[index])
        return X[rows], Y[rows]


class Ending(torch.utils.data.IterableDataset):
    """Six batches says every rank, and one ends after five."""

    def __init__(self, rank):
        self.count = 6 - rank

    def __len__(self):
        return 6

    def __iter__(self):
        yield from [(X[:4], Y[:4])] * self.count


def odd_batches(rank):
    ones = np.ones(4, "float32")
    yield from [(X[:4], Y[:4])] * 2
    yield (X[:4], Y[:4], ones) if rank == 1 else (X[:4], Y[:4])


def fit_and_fit_others(rank):
    trained = model()
    trained.fit(Odd(0, 0), verbose=0, shuffle=False)
    trained.fit(Odd(0, 0, start=rank), verbose=0, shuffle=False)


def draw_and_fit(rank):
    trained = model()
    trained.fit(X, Y, batch_size=4, verbose=0)
    torch.rand(rank)
    trained.fit(X, Y, batch_size=4, verbose=0)


# What one rank gives otherwise, and the error that says so.
BATCH = r"\[\(4, 5\) float32, \(4, 2\) float32\]"
ODD_BATCH = BATCH.replace("(4", "(3")
DIFFERENCES = {
    "batch in the middle": (
        lambda rank: model().fit(Odd(rank, 4), verbose=0, shuffle=False),
        f"batch 4: rank 1 has {ODD_BATCH}, rank 0 has {BATCH}",
    ),
    "batch of a prediction": (
        lambda rank: model().predict(Odd(rank, 7), verbose=0),
        f"batch 7: rank 1 has {ODD_BATCH}",
    ),
    "number of batches, which is not what the source says": (
        lambda rank: model().evaluate(
            torch.utils.data.DataLoader(Ending(rank), batch_size=None), verbose=0
        ),
        "steps per epoch: rank 1 has 5, rank 0 has more than 5",
    ),
    "rows of a later epoch": (fit_and_fit_others, "batch input 0: rank 1 has .*content"),
    "structure of a generator's batch": (
        lambda rank: model().fit(odd_batches(rank), shuffle=False, verbose=0),
        r"batch 2: rank 1 has .*, \(4,\) float32\], rank 0 has .*, \(4, 2\) float32\]\.",
    ),
    "arrays": (
        lambda rank: model().fit(X[: 14 - rank], Y[: 14 - rank], batch_size=4, verbose=0),
        r"batch arrays: rank 1 has .*\(13, 5\) float32.* rank 0 has .*\(14, 5\) float32",
    ),
    "size of batches": (
        lambda rank: model().evaluate(X[:12], Y[:12], batch_size=4 + rank, verbose=0),
        "batch size: rank 1 has 5, rank 0 has 4",
    ),
    "draws": (draw_and_fit, "torch's generator: rank 1 has .*set_random_seed"),
}


def test_batches_that_differ_later_are_named_on_every_rank():
    """After each, the ranks are still together: the next is found in the same processes."""

    def program(rank):
        distribute((2, 1))
        for train, match in DIFFERENCES.values():
            with pytest.raises(RankMismatchError, match=match):
                train(rank)

    run_ranks(program, 2)


def test_own_rows_of_another_structure_are_named_at_any_step():
    def program(rank):
        distribute((2, 1), auto_shard_dataset=False)
        trained = model()
        trained.train_on_batch(X[:4], Y[:4])
        with pytest.raises(RankMismatchError, match="1 gave a batch of 3 arrays, process 0 of 2"):
            trained.train_on_batch(X[:4], Y[:4], sample_weight=np.ones(4) if rank == 1 else None)
        with pytest.raises(RankMismatchError, match=r"1 gave rows of shape \(4, 5, 1\)"):
            trained.test_on_batch(X[:4, :, None] if rank == 1 else X[:4], Y[:4])
        with pytest.raises(LayoutError, match=r"no tensor for those of shape .*dtype object"):
            trained.predict_on_batch(X[:4].astype(object))

    run_ranks(program, 2)


def test_unequal_numbers_of_steps_are_an_error_on_every_rank():
    def program(rank):
        distribute((2, 1), auto_shard_dataset=False)
        rows = 8 + 4 * rank
        model().fit(X[:rows], Y[:rows], batch_size=4, verbose=0)

    assert_fails_everywhere(
        program, 2, error=RankMismatchError, match="steps per epoch: rank 1 has 3, rank 0 has 2"
    )


def test_ranks_that_share_their_rows_must_give_the_same_number():
    def program(rank):
        distribute((1, 2), RULES, auto_shard_dataset=False)
        rows = 4 + rank
        model().train_on_batch(X[:rows], Y[:rows])

    assert_fails_everywhere(
        program,
        2,
        error=RankMismatchError,
        match="compute on the same rows.*shape .4, 5.*shape .5, 5.*data_shard_id",
    )


def test_ranks_that_share_their_rows_must_give_the_same_values():
    def program(rank):
        distribute((1, 2), RULES, auto_shard_dataset=False)
        model().train_on_batch(X[:4] + rank, Y[:4])

    assert_fails_everywhere(
        program, 2, error=RankMismatchError, match="Ranks 0 and 1 .*batch input 0.*content"
    )
