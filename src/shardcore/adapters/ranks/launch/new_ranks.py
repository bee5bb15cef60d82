"""Ranks that are new interpreters, where a forked process could not compute (ADR 52).

It imports nothing of the caller's program: it is started by a command, so that no `__main__` is
imported again. It is in another
session, as a notebook interrupts the group of its process. It ends with this process.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import attrs

from shardcore.adapters.ranks.job import started_ranks
from shardcore.adapters.ranks.job.forked_ranks import LAUNCH_VARIABLES
from shardcore.adapters.ranks.job.started_ranks import Rank, Stream, Workspace
from shardcore.domain.ranks.job import rank_variables

# The module that an interpreter runs, with the words of `RankCall.words`.
PROGRAM = "shardcore.bootstrap.ranks.launched"
# Keras reads it before anything that was sent can say it.
_BACKEND = {"KERAS_BACKEND": "torch"}
# The seconds in which a forked process answers.
_SECONDS = 20.0
_YES, _NO = b"y", b"n"
# torch 2.10 to 2.15 says so, and has no public name by which to ask.
_OF_A_FORK = "forked subprocess"


@attrs.frozen
class RankCall:
    """The words of the command that starts a new interpreter.

    Args:
        rank: Its rank.
        folder: The folder of the call, which has what was sent.
        pipe: The number of the pipe for its result.
        parent: The process with which it ends.
    """

    rank: int
    folder: Path
    pipe: int
    parent: int

    def words(self) -> list[str]:
        """Writes the call as the words after the name of the program."""
        return [str(self.rank), str(self.folder), str(self.pipe), str(self.parent)]

    @classmethod
    def of(cls, words: list[str]) -> "RankCall":
        """Parses the words that `words` has written."""
        rank, folder, pipe, parent = words
        return cls(int(rank), Path(folder), int(pipe), int(parent))


class _Interpreter:
    """A process with those that it has started, as `multiprocessing` shows a process."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def join(self) -> None:
        self._process.wait()

    def close(self) -> None:
        """Has nothing to release: `join` has."""


def run(
    workspace: Workspace, world_size: int, timeout: float | None, environment: Mapping[str, str]
) -> list[Any]:
    """Runs ranks; `workspace` has their function. Returns their results in order.

    Args:
        workspace: The environment and the folder.
        world_size: The number of ranks.
        timeout: Seconds until all ranks are killed; None for no limit.
        environment: Further variables of the ranks.

    Raises:
        RankFailed: If a rank raised, died or did not end in time. No rank is left.
    """
    ranks: list[Rank] = []
    started_ranks.flush()
    with started_ranks.killed_at_end(ranks):
        with started_ranks.deferred_interrupts():  # else a rank could be started and not known
            ranks.extend(_start(rank, workspace, environment) for rank in range(world_size))
        return started_ranks.collect(timeout, workspace, ranks)


def _start(rank: int, workspace: Workspace, environment: Mapping[str, str]) -> Rank:
    receiver, sender = os.pipe()
    call = RankCall(rank, workspace.folder, sender, os.getpid())
    printed = [os.pipe(), os.pipe()]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", PROGRAM, *call.words()],
        env=_environment(rank, workspace, environment),
        stdin=subprocess.DEVNULL,
        stdout=printed[0][1],
        stderr=printed[1][1],
        pass_fds=[sender],
        start_new_session=True,
    )
    for number in (sender, printed[0][1], printed[1][1]):
        os.close(number)
    streams = (Stream(printed[0][0], lambda: sys.stdout), Stream(printed[1][0], lambda: sys.stderr))
    return Rank(rank, _Interpreter(process), Connection(receiver, writable=False), streams)


def _environment(rank: int, workspace: Workspace, environment: Mapping[str, str]) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCH_VARIABLES)}
    # It finds shardcore, and what that imports, as this process did; it then takes over `sys.path`.
    package = str(Path(__file__).parents[4])
    own["PYTHONPATH"] = os.pathsep.join([*filter(None, sys.path), package])
    return {**own, **_BACKEND, **rank_variables(workspace.environment, rank), **environment}


def has_devices() -> bool:
    """Tells whether torch is loaded and sees an accelerator, such as a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.accelerator.is_available())


def fork_can_compute() -> bool:
    """Tries whether a process that is forked now can use what torch uses in this one.

    torch has no name by which a parent can ask. So a process is forked, and tries.
    """
    torch = sys.modules.get("torch")
    if torch is None or torch.accelerator.current_accelerator(check_available=False) is None:
        return True  # it has used no device, and knows none
    has_cuda = torch.cuda.is_available()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of forking beside threads: that is what is tried.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        _answer(writer, has_cuda)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], _SECONDS)
        return bool(ready) and os.read(reader, 1) == _YES
    finally:
        os.close(reader)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _answer(writer: int, has_cuda: bool) -> NoReturn:
    try:
        # A device is not to be started for it, nor a thread of autograd for each device.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        is_refused = (has_cuda and _refuses_cuda()) or _refuses_backward() or _is_refused_again()
        os.write(writer, _NO if is_refused else _YES)
    finally:
        os._exit(0)


def _refuses_cuda() -> bool:
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - of no device, which is as asked
        return _OF_A_FORK in str(error)
    return False


def _is_refused_again() -> bool:
    """Tries whether a process that is forked from this one could run no backward pass.

    A build of torch for CUDA counts devices that are not there once there were tensors without
    values, as `torch.compile` has them: then the pass before has started threads for them.
    """
    process = os.fork()
    if process == 0:
        os._exit(int(_refuses_backward()))
    return os.waitpid(process, 0)[1] != 0


def _refuses_backward() -> bool:
    import torch

    try:
        with torch.inference_mode(False), torch.enable_grad():
            torch.autograd.backward(torch.zeros((), device="cpu", requires_grad=True))
    except RuntimeError:  # of autograd's threads, which do not survive a fork
        return True
    return False
