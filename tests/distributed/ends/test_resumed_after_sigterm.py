"""A fit that SIGTERM has ended goes on at the step after, as if nothing had happened."""

import os
import signal
import time

import keras
import numpy as np
import pytest

from shardcore.testing import RankFailed, run_ranks
from tests.distributed.files import test_backups
from tests.distributed.files.test_backups import STEPS, Stop, all_steps, build, distribute

# The watch of a rank sees SIGTERM within a second.
SEEN_SECONDS = 2


class Steps(Stop):
    """Writes the steps that begin; SIGTERM comes to rank 1 in one of them, and all stand still."""

    def __init__(self, folder, rank, last=None):
        super().__init__()
        self.path, self.rank, self.last = folder / f"steps-{last is None}-{rank}", rank, last

    def on_train_batch_begin(self, batch, logs=None):
        super().on_train_batch_begin(batch)
        with self.path.open("a") as file:
            file.write(f"{self.epoch} {batch}\n")

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.last:
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(SEEN_SECONDS)

    def read(self):
        """Returns the steps that are written."""
        rows = self.path.read_text().splitlines()
        return [tuple(map(int, row.split())) for row in rows]


@pytest.mark.parametrize("frequency", ["epoch", 100])
@pytest.mark.parametrize("last", [(1, 2), (1, STEPS - 1)])
def test_a_backup_at_sigterm_holds_the_step_of_the_epoch(last, frequency, tmp_path):
    def undisturbed(rank):
        distribute(2)
        model = build()
        history = test_backups.fit(model)
        return model.get_weights(), history.history["loss"]

    def train(rank, seed, last):
        distribute(2)
        model = build(seed)
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=frequency)
        history = test_backups.fit(model, Steps(tmp_path, rank, last), backup)
        return model.get_weights(), history.history["loss"]

    expected, losses = run_ranks(undisturbed, 2)[0]
    with pytest.raises(RankFailed, match="SIGTERM on rank 1"):
        run_ranks(train, 2, 1, last)
    resumed = run_ranks(train, 2, 2, None)
    following = all_steps().index(last) + 1
    for rank, (weights, found) in enumerate(resumed):
        assert Steps(tmp_path, rank, last).read() == all_steps()[:following]
        assert Steps(tmp_path, rank).read() == all_steps()[following:]
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(found, losses[-len(found) :], rtol=1e-5)
