"""A rank that fails ends all ranks within 15 seconds, its own error first; an orderly end is quiet.

Whole programs in separate processes, as the exit codes and the printed lines are the subject.
"""

import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from shardcore.adapters.ranks.failure.watch import FailureWatch
from shardcore.adapters.ranks.job.forked_ranks import free_port
from shardcore.testing import run_ranks
from tests import warm
from tests.distributed.failure.failing_program import PROGRAM, Outcome, environment


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def by_hand(program: Path, *arguments: object, world_size: int = 2, start=warm.Program) -> Outcome:
    address = f"127.0.0.1:{free_port()}"
    command = [str(program), *map(str, arguments), str(program.parent)]
    environs = [
        environment(
            KERAS_DISTRIBUTION_JOB_ADDRESSES=address,
            KERAS_DISTRIBUTION_NUM_PROCESSES=str(world_size),
            KERAS_DISTRIBUTION_PROCESS_ID=str(rank),
        )
        for rank in range(world_size)
    ]
    return Outcome([start(command, environ) for environ in environs], program.parent)


def torchrun(program: Path, *arguments: object) -> Outcome:
    options = ["--nproc_per_node=2", f"--master-port={free_port()}"]
    command = [*options, str(program), *map(str, arguments), str(program.parent)]
    return Outcome([warm.start_torchrun(command, environment())], program.parent)


@pytest.mark.parametrize(
    ("failing", "meanwhile"),
    [(1, "collective"), (0, "collective"), (1, "loop"), (1, "sleep"), (0, "sleep")],
)
def test_by_hand_an_exception_ends_all_ranks_and_all_name_it(program, failing, meanwhile):
    outcome = by_hand(program, failing, "raise", meanwhile)
    assert outcome.codes == [1, 1]
    assert outcome.seconds < 15
    own, other = outcome.errors[failing], outcome.errors[1 - failing]
    assert own.startswith(f"[rank {failing}] failed:\n")
    assert own.count("ValueError: the cause") == 1
    assert other.startswith(f"[rank {1 - failing}] ends, as rank {failing} failed first:")
    assert "ValueError: the cause" in other
    assert len(other.splitlines()) == 1  # the traceback is shown once, by the rank that failed
    assert (program.parent / "cleaned").exists()


@pytest.mark.parametrize(
    ("how", "shown", "headline"),
    [
        ("NoText", "NoText: <exception str() failed>", "NoText: <exception str() failed>"),
        ("gloo without a text", "<exception str() failed>", "<exception str() failed>"),
        ("NoNotes", "NoNotes: the cause", "NoNotes: the cause"),
        ("NoFacts", "NoFacts: the cause", "NoFacts: the cause"),
        ("hook", "ValueError: the cause", "ValueError: the cause"),
        ("report", "ValueError: the cause", "ValueError: the cause"),
    ],
)
def test_an_error_that_cannot_be_read_is_shown_and_named_as_far_as_it_can(
    program, how, shown, headline
):
    """Also if the hook of the program fails, or our own report: no rank ends without a word."""
    for failing in (0, 1):  # rank 0 holds the store
        # The forked programs of `warm` read the attributes of an error.
        start = warm.new_interpreter if how == "NoFacts" else warm.Program
        outcome = by_hand(program, failing, how, "sleep", start=start)
        own, other = outcome.errors[failing], outcome.errors[1 - failing]
        assert outcome.codes == [1, 1], own
        assert outcome.seconds < 15
        assert own.startswith(f"[rank {failing}] failed")
        assert 'program.py", line' in own
        assert shown in own
        assert other.startswith(f"[rank {1 - failing}] ends, as rank {failing} failed first: ")
        assert other.endswith(f"{headline}\n")
        assert len(other.splitlines()) == 1


def test_the_line_about_another_rank_is_one_line_of_some_length(program):
    outcome = by_hand(program, 1, "lines", "sleep")
    assert outcome.codes == [1, 1]
    (line,) = outcome.errors[0].splitlines()
    assert line.startswith("[rank 0] ends, as rank 1 failed first: ValueError: ")
    assert "[rank 0] ends: forged forged" in line
    assert line.endswith(" ...")
    assert len(line) < 1200
    assert len(outcome.errors[1]) > 10_000_000  # all of it, by the rank that failed


def test_a_rank_without_a_free_file_is_quiet_and_watches_on(program):
    """It cannot open the files of other processes for a while: that is no failure."""
    outcome = by_hand(program, 1, "files", "sleep")
    assert outcome.codes == [1, 1]
    assert outcome.errors[1].startswith("[rank 1] failed:\n")
    assert outcome.errors[1].count("Traceback") == 1
    assert outcome.errors[0].endswith("ValueError: the cause\n")


def test_an_exit_whose_code_has_no_text_is_named(program):
    outcome = by_hand(program, 1, "exit with an error", "sleep")
    assert outcome.codes == [1, 3]
    assert outcome.errors[0].endswith("SystemExit: <exception str() failed>\n")


@pytest.mark.parametrize("meanwhile", ["sleep", "handler"])
def test_the_finally_blocks_of_the_other_ranks_run(program, meanwhile):
    """Also if they work inside of `except`, as programs do that look for a file first."""
    assert by_hand(program, 1, "raise", meanwhile).codes == [1, 1]
    assert (program.parent / "cleaned too").exists()


def test_a_rank_that_swallows_the_interrupt_ends_all_the_same(program):
    outcome = by_hand(program, 1, "raise", "stubborn")
    assert outcome.codes == [1, 1]
    assert outcome.seconds < 15


def test_by_hand_a_third_rank_hears_it_too(program):
    outcome = by_hand(program, 2, "raise", "collective", world_size=3)
    assert outcome.codes == [1, 1, 1]
    assert outcome.seconds < 15
    for rank in (0, 1):
        assert outcome.errors[rank].startswith(f"[rank {rank}] ends, as rank 2 failed first:")


@pytest.mark.parametrize("failing", [0, 1])
def test_by_hand_a_killed_rank_is_missed(program, failing):
    outcome = by_hand(program, failing, "kill", "sleep")
    assert outcome.codes[failing] == -signal.SIGKILL
    assert outcome.codes[1 - failing] == 1
    assert outcome.seconds < 15
    other = outcome.errors[1 - failing]
    assert f"rank {failing} failed first:" in other
    assert "its process ended without an error" in other


def test_by_hand_a_rank_that_is_killed_with_its_store_is_named(program):
    outcome = by_hand(program, 0, "kill", "exchange")
    assert outcome.codes == [-signal.SIGKILL, 1]
    assert outcome.seconds < 15
    where = (
        r"is at fit\(\) of model 'net' \(program.py:\d+\) and waits for rank 0, which has ended or"
    )
    assert re.search(f"{where} was killed", outcome.errors[1])
    assert "if rank == 0" not in outcome.errors[1]


def test_by_hand_a_rank_that_is_asked_to_end_is_named(program):
    outcome = by_hand(program, 1, "terminate", "sleep")
    assert outcome.codes == [143, 143]
    assert outcome.seconds < 10
    assert outcome.errors == [f"[rank {rank}] ends: SIGTERM on rank 1\n" for rank in (0, 1)]
    assert (program.parent / "cleaned").exists()
    assert (program.parent / "cleaned too").exists()


def test_by_hand_the_death_of_a_rank_is_reported_before_the_error_it_causes(program):
    outcome = by_hand(program, 1, "kill", "collective")
    assert outcome.codes == [1, -signal.SIGKILL]
    assert outcome.seconds < 15
    assert outcome.errors[0].splitlines()[0].startswith("[rank 0] ")
    assert "rank 1 failed first:" in outcome.errors[0]


def test_by_hand_a_rank_that_exits_is_named_by_the_rank_that_waits_for_it(program):
    outcome = by_hand(program, 1, "exit", "collective")
    assert outcome.codes == [1, 3]
    assert outcome.seconds < 15
    assert outcome.errors[0].startswith("[rank 0] failed after rank 1 had ended:\n")
    last = outcome.errors[0].splitlines()[-1]
    where = r"\[rank 0\] waited in a collective \(program.py:\d+\) for rank 1, which has ended\. "
    assert re.match(where, last), outcome.errors[0]


def test_by_hand_an_interrupt_ends_all_ranks(program):
    outcome = by_hand(program, 1, "interrupt", "sleep")
    assert outcome.codes == [1, 130]
    assert outcome.seconds < 15
    assert "rank 1 failed first:" in outcome.errors[0]
    assert "KeyboardInterrupt" in outcome.errors[0]


def test_by_hand_a_rank_that_swallows_the_consequence_fails_all_the_same(program):
    assert by_hand(program, 1, "raise", "swallow").codes == [1, 1]


@pytest.mark.parametrize(
    ("meanwhile", "start"),
    [
        ("rank 0 first", warm.Program),
        ("rank 0 last", warm.Program),
        ("together", warm.new_interpreter),  # whose own end may print, too
    ],
)
def test_by_hand_an_orderly_end_is_quiet(program, meanwhile, start):
    outcome = by_hand(program, -1, "never", meanwhile, start=start)
    assert outcome.codes == [0, 0]
    assert outcome.errors == ["", ""]


@pytest.mark.parametrize(("failing", "meanwhile"), [(1, "collective"), (0, "loop")])
def test_torchrun_an_exception_ends_all_ranks_and_comes_first(program, failing, meanwhile):
    outcome = torchrun(program, failing, "raise", meanwhile)
    assert outcome.codes[0] != 0
    assert outcome.seconds < 15
    error = outcome.errors[0]
    assert error.startswith(f"[rank {failing}] failed:\n")
    cause = error.split("Root Cause")[1]
    assert f"rank      : {failing} " in cause
    assert "exitcode  : 1 " in cause


@pytest.mark.parametrize(("how", "code"), [("kill", "-9"), ("exit", "3")])
def test_torchrun_a_rank_that_leaves_ends_all(program, how, code):
    outcome = torchrun(program, 1, how, "sleep")
    if how != "exit":  # which is in order
        assert "[rank 0] ends, as rank 1 failed first: " in outcome.errors[0]
    assert outcome.codes[0] != 0
    assert outcome.seconds < 15
    assert f"exitcode  : {code} " in outcome.errors[0].split("Root Cause")[1]


def test_torchrun_an_orderly_end_is_quiet(program):
    outcome = torchrun(program, -1, "never", "rank 0 first")
    assert (outcome.codes, outcome.errors) == ([0], [""])


def test_a_stopped_watch_leaves_nothing_behind_and_can_be_started_again():
    def program(rank):
        hook, threads = sys.excepthook, threading.active_count()
        for _ in range(2):
            watch = FailureWatch.start()
            if watch is None:
                return False
            assert sys.excepthook != hook
            watch.stop()
            watch.stop()
            assert sys.excepthook == hook
            assert threading.active_count() == threads
        return True

    assert run_ranks(program, 2) == [True, True]
    assert run_ranks(program, 1) == [False]


def test_a_group_of_simulated_ranks_is_not_watched():
    """Their end would be waited for in vain."""

    def program(_rank):
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers it

        dist.init_process_group("fake", rank=0, world_size=8, store=dist.HashStore())
        return FailureWatch.start() is None

    assert run_ranks(program, 1, init=False) == [True]


def test_a_failing_rank_ends_though_its_log_is_never_read(program):
    address = f"127.0.0.1:{free_port()}"
    read, write = os.pipe()
    ranks = [
        warm.Program(
            [str(program), "1", "raise", "sleep", str(program.parent)],
            environment(
                KERAS_DISTRIBUTION_JOB_ADDRESSES=address,
                KERAS_DISTRIBUTION_NUM_PROCESSES="2",
                KERAS_DISTRIBUTION_PROCESS_ID=str(rank),
            ),
            output=write,
        )
        for rank in range(2)
    ]
    os.close(write)
    os.close(read)
    try:
        assert [rank.wait(timeout=60) for rank in ranks] == [1, 1]
    finally:
        for rank in ranks:
            rank.kill()
