"""Reports of launched ranks: only the rank itself reports, and what cannot be sent is named."""

import multiprocessing
import os
import sys
import threading
import time

import pytest

import shardcore
from shardcore.errors import RankFailed

both_ways = pytest.mark.parametrize("start", ["fork", "spawn"])


def forks(how):
    process = os.fork()
    if process == 0:
        if how == "raises":
            raise ValueError("in the child")
        if how == "exits":
            sys.exit(3)
        if how == "exits with a text":
            sys.exit("no more rows")
        return "child"
    time.sleep(0.2)
    return "parent", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@both_ways
@pytest.mark.parametrize(
    ("how", "code", "shown"),
    [
        ("returns", 0, ""),
        ("raises", 1, "ValueError: in the child\n"),
        ("exits", 3, ""),
        ("exits with a text", 1, "no more rows\n"),
    ],
)
def test_a_process_that_a_rank_forks_does_not_report_for_it(start, how, code, shown, capfd):
    """It ends as Python ends a program: its parent may ask for its exit code."""
    assert shardcore.launch(forks, 2, how, start=start) == [("parent", code)] * 2
    assert multiprocessing.active_children() == []
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count(shown) == 2 if shown else err == ""
    assert "src/shardcore" not in err


def fail_to_read():
    raise RuntimeError("it cannot be read")


class Hostile:
    def __reduce__(self):
        return fail_to_read, ()


class HasNoPickle:
    def __reduce__(self):
        raise RuntimeError("it cannot be sent")


def make(kind):
    return kind() if os.environ["RANK"] == "1" else 1


def lines(*kinds):
    yield from kinds


@both_ways
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (threading.Lock, "got one of type 'lock' (TypeError: cannot pickle '_thread.lock' object)"),
        (lines, "got one of type 'generator' (TypeError: cannot pickle 'generator' object)"),
        (HasNoPickle, "got one of type 'HasNoPickle' (RuntimeError: it cannot be sent)"),
        (Hostile, "RuntimeError: it cannot be read"),
    ],
)
def test_a_result_that_cannot_be_sent_is_a_failure_that_names_rank_type_and_remedy(
    start, kind, words
):
    with pytest.raises(RankFailed) as failed:
        shardcore.launch(make, 2, kind, start=start)
    assert failed.value.rank == 1
    message = str(failed.value)
    assert message.startswith("rank 1 failed:\n")
    assert words in message
    assert "return numbers, arrays, or the paths of files" in message
    assert "src/shardcore" not in message
