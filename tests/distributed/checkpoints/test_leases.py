"""The lease of a directory of checkpoints: one job writes into it, and a restart never waits."""

import os
import signal
import socket
import time
from pathlib import Path

import attrs
import keras
import pytest

import shardcore
from shardcore.adapters.checkpoints import lease
from shardcore.domain.errors import CheckpointError
from shardcore.testing import RankFailed, run_ranks
from tests import warm
from tests.distributed.checkpoints.checkpointed import COLUMNS, X, Y, build, distribute


def fit(folder, *callbacks, epochs=2):
    shardcore.install()
    distribute((1, keras.distribution.get_device_count()), rules=COLUMNS)
    saved = shardcore.ShardedCheckpoint(folder, every_steps=1, keep=2)
    model = build()
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=[*callbacks, saved])


class Wait(keras.callbacks.Callback):
    """Tells that a fit runs, and waits until a test has looked."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            (self.folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
            deadline = time.monotonic() + 60
            while not (self.folder / "go").exists():
                assert time.monotonic() < deadline, "the test does not go on"
                time.sleep(0.02)


JOB = """
import keras, shardcore
from tests.distributed.checkpoints import test_leases
from pathlib import Path
shardcore.install()
keras.distribution.initialize()
test_leases.fit(Path({folder!r}), test_leases.Wait(Path({notes!r})))
"""


def started(folder, notes):
    """Starts a job of two ranks that trains in `folder`, and waits until both do so."""
    words = ["-c", JOB.format(folder=str(folder), notes=str(notes))]
    job = warm.start_ranks(words, 2)
    deadline = time.monotonic() + 60
    while not all((notes / f"pid-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline, "the job does not start"
        time.sleep(0.02)
    return job


def test_a_second_job_stops_at_once_and_names_the_first_which_goes_on(tmp_path):
    folder, notes = tmp_path / "checkpoints", tmp_path
    job = started(folder, notes)
    first = (notes / "pid-0").read_text()

    def second(rank, save):
        began = time.monotonic()
        distribute((1, 2), rules=COLUMNS)
        with pytest.raises(CheckpointError, match="no other job that writes") as error:
            save(folder)
        assert time.monotonic() - began < 10
        return str(error.value)

    def save_once(folder):
        shardcore.save_checkpoint(folder, build(), step=99)

    for save in (save_once, fit):
        for message in run_ranks(second, 2, save):
            assert f"process {first} on host {socket.gethostname()!r}, started 20" in message
    (notes / "go").touch()
    assert [each.wait(60) for each in job] == [0, 0]
    assert sorted(os.listdir(folder)) == ["step-00000005", "step-00000006"]


def test_a_job_that_was_killed_is_restarted_at_once(tmp_path):
    folder, notes = tmp_path / "checkpoints", tmp_path
    job = started(folder, notes)
    for rank in range(2):  # they are zombies: their parent does not wait for them
        os.kill(int((notes / f"pid-{rank}").read_text()), signal.SIGKILL)

    def again(rank):
        began = time.monotonic()
        fit(folder, epochs=3)
        return time.monotonic() - began

    assert max(run_ranks(again, 2)) < 20
    assert sorted(os.listdir(folder)) == ["step-00000008", "step-00000009"]
    assert [each.wait(60) for each in job] == [-signal.SIGKILL] * 2


def test_a_fit_that_fails_releases_its_directory(tmp_path):
    def train(rank):
        class Fail(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                raise RuntimeError("of the user")

        distribute((1, 2), rules=COLUMNS)
        with pytest.raises(RuntimeError, match="of the user"):
            fit(tmp_path, Fail())
        fit(tmp_path)

    run_ranks(train, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000005", "step-00000006"]


@pytest.fixture
def quick(monkeypatch):
    """Owners on other hosts count as dead after a second."""
    monkeypatch.setattr(lease, "PATIENCE", 1.0)
    monkeypatch.setattr(lease, "RENEWED_EVERY", 0.1)


def elsewhere(monkeypatch):
    """Lets this process be one of another host."""
    here = lease.Owner.here

    def other(token):
        return attrs.evolve(here(token), host="node-7", boot="0123abcd")

    monkeypatch.setattr(lease.Owner, "here", other)


def test_the_lease_of_another_host_that_lives_is_refused_and_of_a_dead_one_taken(
    tmp_path, monkeypatch, quick, caplog
):
    with monkeypatch.context() as patched:
        elsewhere(patched)
        first = lease.acquire(tmp_path)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"process \d+ on host 'node-7', started 20"):
        lease.acquire(tmp_path)
    assert time.monotonic() - began < 1
    assert "waiting up to 1 s whether it lives" in caplog.text

    first._is_over.set()  # its renewals end, as those of a dead process
    began = time.monotonic()
    second = lease.acquire(tmp_path)
    assert time.monotonic() - began < 2
    with pytest.raises(CheckpointError, match="has lost the lease"):
        first.check()
    second.check()
    second.release()
    assert os.listdir(tmp_path) == []


def test_an_owner_that_lost_its_lease_renames_nothing(tmp_path, monkeypatch):
    def save(rank):
        distribute((1, 1))
        model = build()
        shardcore.save_checkpoint(tmp_path, model, step=1)
        sync = os.fsync

        def lose(descriptor):  # while its file is written
            for file in (tmp_path / ".lease").iterdir():
                file.rename(file.with_name(f"{file.name}0"))
            sync(descriptor)

        os.fsync = lose
        with pytest.raises(CheckpointError, match=r"lost the lease.*process \d+ on host"):
            shardcore.save_checkpoint(tmp_path, model, step=1)
        os.fsync = sync
        return sorted(os.listdir(tmp_path))

    assert run_ranks(save, 1) == [[".lease", ".unfinished-step-00000001", "step-00000001"]]


def test_of_many_processes_one_at_a_time_has_the_lease(tmp_path):
    def take_turns(rank):
        had = 0
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            try:
                own = lease.acquire(tmp_path)
            except CheckpointError:
                continue
            with (tmp_path / "held").open("x"):
                had += 1
            time.sleep(0.002)
            own.check()
            (tmp_path / "held").unlink()
            own.release()
        return had

    assert sum(run_ranks(take_turns, 4)) > 10
    assert os.listdir(tmp_path) == []


def test_the_owner_dies_while_many_want_its_lease(tmp_path):
    """One of them gets it, each time."""

    def take_and_die(rank):
        lease.acquire(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)

    def take(rank):
        deadline = time.monotonic() + 20
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
        try:
            lease.acquire(tmp_path).check()
        except CheckpointError as error:
            return str(error)
        time.sleep(1)  # the others see that it lives
        return ""

    with pytest.raises(RankFailed):
        run_ranks(take_and_die, 1)
    (tmp_path / "ready").touch()
    messages = run_ranks(take, 4)
    assert messages.count("") == 1, messages
    assert not list(Path(tmp_path).glob(".lease-*"))
