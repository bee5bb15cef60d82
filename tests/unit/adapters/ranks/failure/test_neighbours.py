"""Processes of other ranks, also while this process can open no file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardcore.adapters.ranks.failure.neighbours import HostProcess


@pytest.fixture
def process():
    started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield started
    if started.poll() is None:
        started.communicate(b"\n")


def no_file(path):
    raise OSError(24, "Too many open files", str(path))


@pytest.mark.parametrize("reads", [Path.read_text, no_file])
def test_a_process_is_gone_once_it_has_ended(process, monkeypatch, reads):
    monkeypatch.setattr(Path, "read_text", reads)
    other = HostProcess("a host", process.pid)
    assert (other.is_gone(), other.is_running()) == (False, True)
    process.communicate(b"\n")  # and is reaped
    assert (other.is_gone(), other.is_running()) == (True, False)


def test_a_process_of_another_user_runs(monkeypatch):
    monkeypatch.setattr(Path, "read_text", no_file)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.getuid() == 0:  # root may send signals to all
                os.setuid(65534)
            code = 0 if HostProcess("a host", 1).is_running() else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
