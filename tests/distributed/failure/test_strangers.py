"""Another program that reaches the store ends no job by a forged report, and runs no code.

It lists the keys and writes over them, as any client of torch's store can.
"""

import contextlib
import io
import json
import os
import pickle
import re
import time
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from shardcore.adapters.ranks.failure.watch import FailureWatch
from shardcore.adapters.ranks.job import exchange, process_group
from shardcore.domain.errors import EnvironmentProblem
from shardcore.domain.ranks.job import resolve_job
from shardcore.testing import run_ranks


class Creates:
    """Creates a file where pickle reads it."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def forged(file):
    report = json.dumps({"rank": 0, "headline": "forged"}).encode()
    return [b"\0\xff", report, bytes(32) + report, pickle.dumps(Creates(file))]


def stranger_in(folder):
    """Returns a connection to the store of the process group that knows no secret."""
    job = resolve_job(environ=os.environ)
    plain = TCPStore(job.master_address, job.master_port, is_master=False)
    key = next(each for each in plain.list_keys() if "shardcore/exchange/" in each)
    return PrefixStore(f"{key.partition('shardcore/')[0]}shardcore/{folder}", plain)


def test_a_value_of_another_program_is_an_error_and_runs_no_code(tmp_path):
    file = tmp_path / "created"

    def program(rank):
        process_group.start(resolve_job(environ=os.environ), timeout=20)
        exchange.share_secret()
        stranger, messages = stranger_in("exchange"), []
        for value in forged(file):
            number = stranger.add(f"count/{rank}", 0) + 1
            if rank == 0:
                stranger.wait([f"{number} is refused"])
                exchange.gather(None)
                stranger.set(f"{number} is over", "")
            else:
                stranger.set(f"{number}/0", value)
                with pytest.raises(EnvironmentProblem) as refused:
                    exchange.gather(None)
                messages.append(str(refused.value))
                stranger.set(f"{number} is refused", "")
                stranger.wait([f"{number} is over"])
        return messages

    _, messages = run_ranks(program, 2, init=False)
    assert len(messages) == 4
    assert all("another program has written it" in message for message in messages)
    assert not file.exists()


def test_a_forged_report_of_a_failure_ends_no_rank_and_a_line_names_it(tmp_path):
    file = tmp_path / "created"

    def program(rank):
        process_group.start(resolve_job(environ=os.environ), timeout=20)
        watch, said = FailureWatch.start(), io.StringIO()
        others = stranger_in("exchange")
        own = f"count/{rank}"  # another rank may have come to the next exchange
        name = re.search(rb"[0-9a-f]{32}", others.get(f"{others.add(own, 0)}/0"))[0].decode()
        stranger = stranger_in(f"failure/{name}")
        with contextlib.redirect_stderr(said):
            for value in forged(file)[1::2] if rank == 0 else ():
                stranger.set("first", value)
                stranger.set("ended/0", value)
                while stranger.get("first") == value:  # until a watch has seen it
                    time.sleep(0.1)
            exchange.gather(None)
            watch.stop()
        return said.getvalue()

    said = run_ranks(program, 2, init=False, timeout=30)
    assert "Expected the value 'first' in the store" in "".join(said)
    assert not file.exists()
