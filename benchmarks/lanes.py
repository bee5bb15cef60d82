"""Contenders in separate processes, which wait while another one is measured."""

import ctypes
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from benchmarks import memory
from benchmarks.cases import Case
from benchmarks.serving import Failure, serve
from benchmarks.training import Training
from shardcore.adapters.ranks.job.forked_ranks import free_port

LOGS = Path("build/bench/logs")
# A step of Inductor's compiler is the longest that a rank may take for one answer.
TIMEOUT = 400.0
_PR_SET_PDEATHSIG = 1  # of sys/prctl.h: a rank does not outlive this process


class LaneFailed(Exception):  # noqa: N818 - it says what happened
    """A contender raised, died or did not answer in time."""


class Lane(Protocol):
    """A contender at work on a case."""

    def ask(self, name: str, *arguments: Any) -> Any:
        """The answer of rank 0, after all ranks have answered."""

    def close(self) -> None:
        """End it, whatever it does."""


@frozen
class _Rank:
    """The settings of a forked process."""

    rank: int
    ranks: int
    folder: str
    port: int
    log: Path
    make: Callable[[], Training]
    maps: bool


class ForkedLane:
    """Ranks that are forked from this process, which has imported Keras and torch already.

    Args:
        make: Makes the training, on each rank.
        ranks: How many; gloo joins them where it is more than one.
        name: Of the file that takes what the ranks print.
        maps: Whether their large blocks are mappings: memory is counted, and not time.
    """

    def __init__(
        self, make: Callable[[], Training], ranks: int, name: str, *, maps: bool = False
    ) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory(prefix="shardcore-bench-")
        self._pipes: list[Connection] = []
        self._processes = []
        self._log = LOGS / f"{name.replace(' ', '-').replace('/', '-')}.txt"
        port = free_port()
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            settings = _Rank(rank, ranks, self._folder.name, port, self._log, make, maps)
            process = context.Process(target=_run, args=(settings, theirs))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._collect()
        except LaneFailed:
            self.close()
            raise

    def ask(self, name: str, *arguments: Any) -> Any:
        for pipe in self._pipes:
            pipe.send([name, *arguments])
        return self._collect()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def _collect(self) -> Any:
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self._pipes):
            ready = wait([pipe for pipe in self._pipes if pipe not in answers], TIMEOUT)
            if not ready:
                raise LaneFailed(f"no answer in {TIMEOUT:.0f} seconds, see {self._log}")
            for pipe in ready:
                answers[pipe] = self._receive(pipe)
        return answers[self._pipes[0]]

    def _receive(self, pipe: Connection) -> Any:
        try:
            answer = pipe.recv()
        except EOFError:
            raise LaneFailed(f"a rank died, see {self._log}") from None
        if isinstance(answer, Failure):
            with self._log.open("a") as log:
                log.write(answer.report)
            raise LaneFailed(f"{answer.report.splitlines()[-1]} ({self._log})")
        return answer


def _run(settings: _Rank, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with settings.log.open("w" if settings.rank == 0 else "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # convolutions as exact as all else
    if settings.ranks > 1:
        os.environ.update(RANK=str(settings.rank), WORLD_SIZE=str(settings.ranks))
        os.environ.update(LOCAL_RANK=str(settings.rank), LOCAL_WORLD_SIZE=str(settings.ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(settings.port))
        dist.init_process_group(
            "gloo",
            init_method=f"file://{settings.folder}/store",
            rank=settings.rank,
            world_size=settings.ranks,
            timeout=timedelta(seconds=TIMEOUT),
        )
    if settings.maps:
        memory.map_large_blocks()
    memory.begin()
    serve(settings.make, pipe.recv, pipe.send)
    pipe.recv()  # stays until it is killed: the other ranks' errors would blur what was first


def open_forked(
    train: Callable[..., Training], ranks: int, layout: str, **options: Any
) -> Callable[..., ForkedLane]:
    """A way to open a lane for a case on a device; `maps` is that of the lane."""

    def open_lane(case: Case, device: str, *, maps: bool = False) -> ForkedLane:
        how = "-".join(str(value) for value in options.values())
        name = f"{case.name}-{layout}-{train.__module__.split('.')[-1]}-{how}"
        return ForkedLane(lambda: train(case, layout, device, **options), ranks, name, maps=maps)

    return open_lane
