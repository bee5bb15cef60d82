"""Real ranks on this machine: processes forked from this one.

A forked process has the modules and functions of its parent, also those of a notebook's cells: it
does not import torch and Keras again. It needs a system with `fork` (Linux, macOS).
"""

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from shardcore.adapters.ranks.job import reports, started_ranks
from shardcore.adapters.ranks.job.started_ranks import Case, Rank, Workspace
from shardcore.domain.errors import MeshError
from shardcore.domain.ranks.job import resolve_job

_Result = TypeVar("_Result")

LAUNCH_VARIABLES = ("KERAS_DISTRIBUTION_", "TORCHELASTIC_")


def run(case: Case[_Result], world_size: int) -> list[_Result]:
    """Runs `case` on `world_size` ranks, and returns their results in the order of ranks.

    Raises:
        MeshError: If `world_size` is below 1.
        RankFailed: If a rank raised, died or did not end in time. No rank is left.
    """
    with workspace_for(world_size) as workspace:
        workspace.environment["OMP_NUM_THREADS"] = "1"
        with _fork_ranks(case, workspace, world_size) as ranks:
            return started_ranks.collect(case.timeout, workspace, ranks)


@contextlib.contextmanager
def workspace_for(world_size: int) -> Iterator[Workspace]:
    """Opens the environment and the folder of `world_size` ranks, with a file for their stacks."""
    environment = environment_of(world_size)
    with tempfile.TemporaryDirectory(prefix="shardcore-ranks-") as folder:
        workspace = Workspace(environment, Path(folder))
        for rank in range(world_size):
            workspace.stacks(rank).touch()
        yield workspace


def environment_of(world_size: int) -> dict[str, str]:
    """Returns the variables that `world_size` ranks of this host share.

    Raises:
        MeshError: If `world_size` is below 1.
    """
    if world_size < 1:
        raise MeshError(f"Expected at least 1 rank, got {world_size}.", got=str(world_size))
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


@contextlib.contextmanager
def _fork_ranks(case: Case[Any], workspace: Workspace, world_size: int) -> Iterator[list[Rank]]:
    """Forks the ranks, and ends them at the end of the context."""
    context = multiprocessing.get_context("fork")
    ranks: list[Rank] = []
    # Every rank would write the buffered text again.
    started_ranks.flush()
    with started_ranks.killed_at_end(ranks):
        with started_ranks.deferred_interrupts():  # else a rank could be forked and not known
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                arguments = (case, workspace, rank, sender)
                # No daemon: a rank may fork processes too.
                process = context.Process(target=_child, args=arguments)
                with warnings.catch_warnings():
                    # Python 3.12 warns of forking beside threads, which is documented above.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                sender.close()
                ranks.append(Rank(rank, process, receiver))
        yield ranks


def free_port() -> int:
    """Returns a TCP port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(case: Case[object], workspace: Workspace, rank: int, sender: Connection) -> None:
    """Runs one rank, which sends `("result", ...)` or `("failure", ...)`."""
    threading.Thread(target=_end_with_parent, name="shardcore-parent", daemon=True).start()
    # An interrupt goes to the parent too, which kills the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Each garbage collection would spend a quarter of a second on the objects of the parent.
    gc.freeze()
    # Only the parent runs the functions that it registered.
    atexit._clear()  # noqa: SLF001 - the only way, undocumented since Python 3.0
    write_stacks(workspace.stacks(rank))

    def work() -> object:
        _become_rank(case, workspace, rank)
        return case.call(rank)

    message = reports.report_of(rank, work, pickle.dumps)
    started_ranks.flush()
    sender.send_bytes(message)
    # Wait to be killed: a rank that ends breaks the connections of the others, whose errors would
    # hide the first one.
    _end_with_parent()


def write_stacks(path: Path) -> None:
    """Makes this process write its stacks to a file: on SIGUSR1, and when it crashes."""
    dump = path.open("w")
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
    faulthandler.enable(file=dump)


def _end_with_parent() -> NoReturn:
    """Ends this process when its parent has ended, also by a signal that it could not handle."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _become_rank(case: Case[object], workspace: Workspace, rank: int) -> None:
    for name in [n for n in os.environ if n.startswith(LAUNCH_VARIABLES)]:
        del os.environ[name]
    os.environ.update(workspace.environment, RANK=str(rank), LOCAL_RANK=str(rank))
    if "keras" in sys.modules and not case.keeps_session:
        sys.modules["keras"].utils.clear_session()
    if "torch" in sys.modules:
        # Here, as only this needs torch.
        from shardcore.adapters.ranks.job import process_group

        process_group.single_threaded()
    join_group(case, workspace)


def join_group(case: Case[object], workspace: Workspace) -> None:
    """Starts the gloo group of the ranks, if the case has one."""
    if not case.init:
        return
    from shardcore.adapters.ranks.job import exchange, process_group

    init_method = f"file://{workspace.folder}/store"
    process_group.start(resolve_job(environ=os.environ), case.timeout, init_method=init_method)
    exchange.share_secret()


# The seconds in which a forked process answers.
_SECONDS = 20.0
_YES, _NO = b"y", b"n"
# torch 2.10 to 2.15 says so, and has no public name by which to ask.
_OF_A_FORK = "forked subprocess"


def has_devices() -> bool:
    """Returns whether torch is loaded and sees an accelerator, such as a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.accelerator.is_available())


def can_compute() -> bool:
    """Returns whether a process that is forked now can use what torch uses in this one.

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
    """Writes whether this process, which is forked, can compute; and ends it."""
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
    """Returns whether a process that is forked from this one could run no backward pass.

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
