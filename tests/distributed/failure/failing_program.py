"""A program of which a rank fails in a chosen way, and how it ended."""

import os
import time

PROGRAM = r"""
import os, resource, signal, sys, time
import torch, torch.distributed as dist
from shardcore.adapters.ranks.job import exchange, process_group
from shardcore.adapters.ranks.failure.watch import FailureWatch
from shardcore.domain.ranks.job import resolve_job

failing, how, meanwhile, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
process_group.start(resolve_job(environ=os.environ))
watch = FailureWatch.start()
dist.barrier()


class NoText(Exception):
    def __str__(self):
        raise ValueError("it has none")

    __repr__ = __str__


class NoNotes(Exception):
    @property
    def __notes__(self):
        raise KeyError("they cannot be read")


class NoFacts(Exception):
    @property
    def __traceback__(self):
        raise KeyError("it cannot be read")

    __cause__ = __context__ = __notes__ = __traceback__


def hook_that_fails(kind, error, trace):
    raise RuntimeError("the hook fails")


def fail():
    open(f"{folder}/failed", "w").write(str(time.time()))
    try:
        if how == "raise":
            error = ValueError("the cause")
            error.add_note("a note, which is no cause")
            raise error
        if how in ("NoText", "NoNotes", "NoFacts"):
            raise globals()[how]("the cause")
        if how == "gloo without a text":
            raise type("GlooError", (NoText, RuntimeError), {})
        if how == "lines":
            raise ValueError("\x1b[31m\n[rank 0] ends: \r\n" + "forged " * 1_500_000)
        if how == "exit with an error":
            exchange.publish_status(exchange.store(), "")
            watch.exits(NoText())
            sys.exit(3)
        if how == "hook":
            sys.excepthook = hook_that_fails
            watch._previous_hook, sys.excepthook = sys.excepthook, watch._on_uncaught
            raise ValueError("the cause")
        if how == "report":
            watch._publish = lambda own: 1 / 0
            raise ValueError("the cause")
        if how == "files":
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
            files = []
            try:
                while True:
                    files.append(open("/dev/null"))
            except OSError:
                time.sleep(5)
            files.clear()
            raise ValueError("the cause")
        if how == "interrupt":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.raise_signal(signal.SIGINT)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        if how == "exit":
            sys.exit(3)
    finally:
        open(f"{folder}/cleaned", "w").close()


if process_group.rank() == failing:
    fail()
elif meanwhile == "collective":
    dist.all_reduce(torch.ones(1))
elif meanwhile == "exchange":
    exchange.gather(None, "fit() of model 'net'")
elif meanwhile == "loop":
    while True:
        pass
elif meanwhile == "sleep":
    try:
        time.sleep(100)
    finally:
        time.sleep(0.5)
        open(f"{folder}/cleaned too", "w").close()
elif meanwhile == "handler":
    try:
        open("/there/is/none")
    except FileNotFoundError:
        try:
            time.sleep(100)
        finally:
            open(f"{folder}/cleaned too", "w").close()
elif meanwhile == "stubborn":
    while True:
        try:
            time.sleep(100)
        except Exception:
            pass
elif meanwhile == "swallow":
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        pass
elif meanwhile == "rank 0 first":
    time.sleep(2.5 * process_group.rank())
elif meanwhile == "rank 0 last":
    time.sleep(2.5 * (process_group.rank() == 0))
"""


class Outcome:
    """Exit codes and stderr of a job by rank, or of its launcher; seconds from failure to end."""

    def __init__(self, processes, folder):
        outputs = [process.communicate(timeout=90) for process in processes]
        self.ended = time.time()
        self.codes = [process.returncode for process in processes]
        self.errors = [error for _, error in outputs]
        self.folder = folder

    @property
    def seconds(self):
        return self.ended - float((self.folder / "failed").read_text())


def environment(**variables):
    inherited = {name: value for name, value in os.environ.items() if "KERAS_DIST" not in name}
    return inherited | {"OMP_NUM_THREADS": "1", **variables}
