"""Runs Python programs in processes forked from this one, which has imported torch and Keras.

A new interpreter takes three seconds to import them. What is about imports, or about the end of an
interpreter, needs one all the same.
"""

import atexit
import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import torch

import shardcore
from shardcore.adapters.ranks.job.forked_ranks import free_port

Words = Sequence[str | os.PathLike[str]]


def load() -> None:
    """Imports all of shardcore, and Keras' optimizers for torch: forked ranks find them loaded."""
    for module in pkgutil.walk_packages(shardcore.__path__, "shardcore."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    # Keras loads its optimizers for torch with the first. On the CPU, as this process forks.
    with keras.device("cpu"):
        keras.optimizers.SGD()
    torch.set_num_threads(1)


class Program:
    """A program as `python WORDS` runs it: with streams, an environment and an exit code.

    Its interface is that of `subprocess.Popen`, as far as tests need it.

    Args:
        words: "-c" and a program, "-m" and a module, or a script; then arguments.
        env: The environment; that of this process, if None.
        cwd: The working folder; that of this process, if None.
        output: The file for both streams. By default each has a file, which `communicate` reads.
    """

    def __init__(
        self,
        words: Words,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        output: int | None = None,
    ) -> None:
        environment = dict(os.environ if env is None else env)
        self._files = [_nameless_file() for _ in range(2)]
        self._printed = ("", "")
        streams = self._files if output is None else [output] * 2
        arguments = (list(map(str, words)), environment, cwd, streams)
        self._process = multiprocessing.get_context("fork").Process(target=_main, args=arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Returns its exit code; kills it if it does not end within `timeout` seconds."""
        self._process.join(timeout)
        is_late = self.returncode is None
        self.kill()
        if is_late:
            for other in multiprocessing.active_children():  # of the same test: they wait for it
                other.kill()
            raise subprocess.TimeoutExpired("\n".join(self._printed), timeout or 0)
        return self._process.exitcode or 0

    def terminate(self) -> None:
        """Asks it to end."""
        self._process.terminate()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Returns what it printed to both streams, as soon as it has ended."""
        self.wait(timeout)
        return self._printed

    def kill(self) -> None:
        """Kills it, if it runs."""
        self._process.kill()
        self._process.join()
        if self._files:
            out, err = map(_content, self._files)
            self._printed, self._files = (out, err), []


def run(
    words: Words,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 180,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, as `subprocess.run` does."""
    program = Program(words, env, cwd)
    out, err = program.communicate(timeout)
    return subprocess.CompletedProcess(words, program.wait(0), out, err)


class _Worker:
    """A rank of torchrun: what it starts as `python -u SCRIPT`, with the interface of `Popen`."""

    def __init__(self, command: Words, environment: dict[str, str]) -> None:
        _, unbuffered, *words = map(str, command)
        assert unbuffered == "-u", command
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_worker, args=(words, environment))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a worker", timeout)


def _worker(words: list[str], environment: dict[str, str]) -> None:
    os.setsid()  # torchrun signals the group of a worker
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, signal.SIG_DFL)
    _main(words, environment, None, [1, 2])


def _torchrun(forks_workers: bool) -> None:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    if forks_workers:
        handler: Any = subprocess_handler.SubprocessHandler
        handler._popen = lambda _, command, environment: _Worker(command, environment)
    torchrun.main(sys.argv[1:])


def start_torchrun(
    words: Words,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    forks_workers: bool = True,
    output: int | None = None,
) -> Program:
    """Starts `torchrun WORDS`, forked from this process as are its workers, unless asked not to."""
    program = f"from tests import warm; warm._torchrun({forks_workers})"
    return Program(["-c", program, *words], env, cwd, output)


def run_torchrun(
    words: Words,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    forks_workers: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Runs `torchrun WORDS` to its end: see `start_torchrun`."""
    program = start_torchrun(words, env, cwd, forks_workers)
    out, err = program.communicate(180)
    return subprocess.CompletedProcess(words, program.wait(0), out, err)


def new_interpreter(
    words: Words, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> "subprocess.Popen[str]":
    """Starts a program in a new interpreter, which imports torch and Keras itself."""
    return subprocess.Popen(
        [sys.executable, *words],
        env=env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_ranks(
    words: Words, count: int, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> list[Program]:
    """Starts a program on `count` ranks, with the variables that torchrun sets."""
    job = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    inherited = os.environ if env is None else env
    return [
        Program(words, {**inherited, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd)
        for rank in range(count)
    ]


def _nameless_file() -> int:
    number, path = tempfile.mkstemp()
    os.unlink(path)
    return number


def _content(number: int) -> str:
    with open(number) as file:
        file.seek(0)
        return file.read()


def _main(
    words: list[str], environment: dict[str, str], cwd: Path | None, streams: list[int]
) -> None:
    """Runs the program as the interpreter would, and ends the process."""
    _forget_pytest(environment, streams)
    if cwd is not None:
        os.chdir(cwd)
    code = 0
    try:
        _run(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader has closed it
            stream.flush()
    os._exit(code)


def _run(words: list[str]) -> None:
    kind, *rest = words
    sys.path[:0] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        namespace = {"__name__": "__main__"}
        exec(compile(rest[0], "<string>", "exec"), namespace)
    elif kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(kind).resolve().parent))
        sys.argv = words
        runpy.run_path(kind, run_name="__main__")


def _forget_pytest(environment: dict[str, str], streams: list[int]) -> None:
    """Gives this process the state of a new one, but for its modules."""
    # Each garbage collection would spend a quarter of a second on the objects of the parent.
    gc.freeze()
    atexit._clear()
    keras.utils.clear_session(free_memory=False)  # the numbers in names, and the seed
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    logging.getLogger().handlers[:] = []
    warnings.resetwarnings()
    warnings.showwarning = warnings._showwarning_orig
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - the program's, to its end
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - likewise
