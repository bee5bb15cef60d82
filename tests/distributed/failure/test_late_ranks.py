"""A rank that does not come to a collective: the others say which rank, collective and layer."""

import multiprocessing
import os
import re
import signal
import time
from datetime import timedelta

import keras
import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardcore.adapters import torch_private
from shardcore.adapters.ranks.failure import heartbeats, watch
from shardcore.adapters.ranks.failure.store import within
from shardcore.adapters.ranks.job import exchange
from shardcore.adapters.ranks.job.forked_ranks import free_port
from shardcore.testing import RankFailed, run_ranks
from tests.distributed.programs import distribute

X, Y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")
STEPS = 5


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def compute():
    time.sleep(60)


def step_of_own_loop(model):
    return (model(X) ** 2).mean().backward()


def captured_step(model):
    return model.train_on_batch(X, Y)


def compiled_step(model):
    """As Inductor compiles it, without Inductor: the graph that it gets runs."""
    torch_private.inductor.compile_graph = lambda module, inputs: module
    model.jit_compile = True
    return model.train_on_batch(X, Y)


def message_of(step, late, monkeypatch):
    """The error of rank 0 if rank 1 calls `late` before its last step."""
    monkeypatch.setenv("SHARDCORE_TIMEOUT", "4")
    monkeypatch.setattr(heartbeats, "_SILENT_SECONDS", 2.0)
    monkeypatch.setattr(exchange, "REPORT_SECONDS", 0.5)

    def program(rank):
        distribute((1, 2), {".*hidden/kernel": (None, "model"), ".*out/kernel": ("model", None)})
        hidden, out = keras.layers.Dense(6, name="hidden"), keras.layers.Dense(2, name="out")
        model = keras.Sequential([keras.Input((4,)), hidden, out], name="net")
        model.compile("sgd", "mse")
        for number in range(STEPS):
            if rank == 1 and number == STEPS - 1:
                late()
            step(model)

    with pytest.raises(RankFailed) as failed:
        run_ranks(program, 2, init=False, timeout=40)
    return str(failed.value)


def test_a_stopped_rank_is_named_with_the_collectives_of_a_compiled_step(monkeypatch):
    message = message_of(compiled_step, stop, monkeypatch)
    where = r"waited 4 seconds in a collective of a compiled step \(all_reduce, .*layer 'net/out'"
    assert re.search(rf"{where}.*\) for rank 1, which does not answer", message), message


@pytest.mark.parametrize("step", [step_of_own_loop, captured_step])
def test_a_stopped_rank_is_named_with_the_collective_and_the_layer(step, monkeypatch, capfd):
    message = message_of(step, stop, monkeypatch)
    how = " of a captured step" if step is captured_step else ""
    where = rf"Rank 0 waited 4 seconds in all_reduce{how} \(.*, in layer 'net/out'\) for rank 1"
    assert re.search(f"{where}, which does not answer", message), message
    line = r"\[rank 0\] has waited \d seconds in a collective \(test_late_ranks.py:\d+\) for rank 1"
    assert re.search(f"{line}, which does not answer", capfd.readouterr().err)


def test_a_rank_that_computes_for_long_is_said_to_compute(monkeypatch, capfd):
    message = message_of(step_of_own_loop, compute, monkeypatch)
    computes = r"for rank 1, which computes \(test_late_ranks.py:\d+\)"
    assert re.search(computes, message), message
    assert re.search(computes, capfd.readouterr().err)


def test_ranks_whose_store_does_not_answer_end_though_they_wait_in_no_collective(
    monkeypatch, capfd
):
    """Its host may have ended, so that no connection breaks. The wait in C++ ends by no signal."""
    monkeypatch.setenv("SHARDCORE_TIMEOUT", "2")
    monkeypatch.setattr(exchange, "REPORT_SECONDS", 1.0)
    monkeypatch.setattr(watch, "_NO_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(watch, "_FINALLY_SECONDS", 0.5)

    def program(rank):
        distribute((1, 3))
        if rank == 0:  # which holds the store
            stop()
        exchange.gather(None)

    with pytest.raises(RankFailed, match="rank 1 ended without a result, exit code 1"):
        run_ranks(program, 3, init=False, timeout=20)
    said = capfd.readouterr().err
    why = r"the store at \S+:\d+, on the host of ranks 0, 1, 2, has not answered for {} seconds"
    for rank in (1, 2):
        ends = rf"\[rank {rank}\] ends, as rank 0 failed first: {why.format(3)}"
        assert re.search(ends, said), said
    assert re.findall(rf"(\[rank \d\]) {why.format(1)}", said) == ["[rank 1]"]


def hold_store(port):
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.wait(["never"], timedelta(seconds=60))


@pytest.fixture
def holder():
    """Another process that holds the store, as the agent of torchrun: its number and port."""
    port = free_port()
    process = multiprocessing.get_context("fork").Process(target=hold_store, args=(port,))
    process.start()
    yield process.pid, port
    process.kill()


def distribute_by(port):
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ.update(agent | {"MASTER_PORT": str(port)})
    distribute((1, 2))


def test_rank_0_ends_too_if_another_process_holds_the_store_and_is_stopped(
    holder, monkeypatch, capfd
):
    """As the agent of torchrun, on a host that is lost."""
    monkeypatch.setenv("SHARDCORE_TIMEOUT", "2")
    monkeypatch.setattr(watch, "_NO_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(watch, "_FINALLY_SECONDS", 0.5)
    pid, port = holder

    def program(rank):
        distribute_by(port)
        exchange.gather(None)
        if rank == 0:
            os.kill(pid, signal.SIGSTOP)
        while True:  # a signal takes a moment: the next values may still be answered
            exchange.gather(None)

    with pytest.raises(RankFailed, match="ended without a result, exit code 1"):
        run_ranks(program, 2, init=False, timeout=20)
    said = capfd.readouterr().err
    for rank in (0, 1):
        ends = rf"\[rank {rank}\] ends, .*: the store at 127.0.0.1:{port}, .* has not answered"
        assert re.search(ends, said), said


def test_ranks_end_in_order_though_the_process_that_holds_the_store_is_stopped(holder, monkeypatch):
    monkeypatch.setattr(watch, "_LEAVE_SECONDS", 1.0)
    monkeypatch.setattr(watch, "_POLL_SECONDS", 0.1)
    pid, port = holder

    def program(rank):
        distribute_by(port)
        shared = exchange.store_for_thread().store
        dist.barrier()
        os.kill(pid, signal.SIGSTOP)
        while within(0.5, shared.num_keys) is not None:
            pass
        return rank

    assert run_ranks(program, 2, init=False, timeout=20) == [0, 1]


@pytest.mark.parametrize("late", [0, 2])
def test_of_ranks_that_wait_in_a_collective_the_lowest_says_for_whom(late, monkeypatch, capfd):
    monkeypatch.setattr(exchange, "REPORT_SECONDS", 2.0)

    def program(rank):
        distribute((1, 4))
        if rank == late:
            time.sleep(8)
        dist.barrier()

    run_ranks(program, 4, init=False, timeout=40)
    said = re.findall(r"(\[rank \d\]) has waited .* for (rank \d)", capfd.readouterr().err)
    assert said == [(f"[rank {0 if late else 1}]", f"rank {late}")]


@pytest.mark.parametrize("late", [0, 2])
def test_of_ranks_that_wait_for_values_the_lowest_says_for_whom(late, monkeypatch, capfd):
    monkeypatch.setattr(exchange, "REPORT_SECONDS", 0.5)

    def program(rank):
        distribute((1, 4))
        if rank == late:
            time.sleep(2)
        exchange.gather(None)

    run_ranks(program, 4, init=False, timeout=40)
    said = re.findall(r"Rank (\d) is at .* has waited .* for rank (.*)", capfd.readouterr().err)
    assert said == [("0" if late else "1", str(late))]


def test_of_ranks_that_wait_for_the_work_of_another_one_says_it(monkeypatch, capfd):
    monkeypatch.setattr(exchange, "REPORT_SECONDS", 0.5)

    def program(rank):
        distribute((1, 4))
        return exchange.do_once(lambda: time.sleep(3), "save 'a.keras'")

    run_ranks(program, 4, init=False, timeout=40)
    said = re.findall(r"Rank \d is at save .* has waited .* for rank (.*)", capfd.readouterr().err)
    assert said == ["0"]


def test_a_rank_whose_connection_breaks_names_the_rank_that_did_not_come(monkeypatch):
    """Its neighbour has waited in vain a moment before, and has closed the connection."""

    def program(rank):
        monkeypatch.setenv("SHARDCORE_TIMEOUT", "4" if rank == 1 else "60")
        distribute((1, 3))
        if rank == 2:
            time.sleep(10)
            return "", ""
        with pytest.raises(RuntimeError) as failed:
            dist.all_reduce(torch.ones(1))
        return str(failed.value), heartbeats.unmatched(failed.value)

    (error, why), *_ = run_ranks(program, 3, init=False, timeout=40)
    assert "closed by peer" in error
    line = r"test_late_ranks.py:\d+"
    assert re.search(rf"waited in a collective \(.*\) for rank 2, which computes \({line}\)", why)


@pytest.mark.parametrize("waits", [True, False])
def test_collectives_of_the_users_own_that_do_not_match_are_said_to(waits, monkeypatch):
    """Rank 1 is in another collective, or computes."""
    monkeypatch.setenv("SHARDCORE_TIMEOUT", "4")

    def program(rank):
        distribute((1, 2))
        dist.barrier()
        if rank == 1 and not waits:
            time.sleep(8)
            return ""
        try:
            dist.all_reduce(torch.ones(1)) if rank == 0 else dist.barrier()
        except RuntimeError as error:
            # One rank times out first, and its connections break: the other's error is that.
            return heartbeats.unmatched(error) or heartbeats.describe_awaited(
                exchange.store_for_thread
            )

    found = run_ranks(program, 2, init=False, timeout=40)
    line = r"test_late_ranks.py:\d+"
    other = rf"rank 1, which computes \({line}\)"
    if waits:
        other = rf"no rank: all wait, in different collectives \(rank [01] at {line}\)"
    assert any(re.match(rf"waited in a collective \({line}\) for {other}", each) for each in found)
