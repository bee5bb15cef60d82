"""The program of a new interpreter: `python -m shardcore.bootstrap.ranks.launched`, by `launch`.

It is the rank that its environment says, takes over what the process that started it has sent,
runs the function, and sends its result.
"""

import io
import os
import shutil
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from shardcore.adapters.ranks.launch.new_ranks import RankCall

_LOOK_SECONDS = 0.2


def main(words: list[str]) -> NoReturn:
    """Runs the rank, and waits to be killed.

    A rank that ends breaks the connections of the others, whose errors would hide the first one.
    """
    from shardcore.adapters.ranks.job import forked_ranks, started_ranks
    from shardcore.adapters.ranks.launch.new_ranks import RankCall

    call = RankCall.of(words)
    arguments = (call.parent, call.folder)
    watch = threading.Thread(target=_end_with, args=arguments, name="shardcore-parent", daemon=True)
    watch.start()
    # An interrupt goes to the parent, which kills the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(call.pipe, False)
    _print_as_a_terminal()
    message = forked_ranks.report_of(call.rank, lambda: _call(call), _dump)
    started_ranks.flush()
    Connection(call.pipe, readable=False).send_bytes(message)
    watch.join()
    os._exit(1)


def _call(call: "RankCall") -> object:
    from shardcore.adapters.ranks.job import forked_ranks
    from shardcore.bootstrap.ranks.sending import StartMessage

    sent = StartMessage.read(call.folder)
    forked_ranks.write_stacks(sent.workspace.stacks(call.rank))
    case = sent.take_over()
    forked_ranks.join_group(case, sent.workspace)
    return case.call(call.rank)


def _dump(report: object) -> bytes:
    import cloudpickle

    pickled: bytes = cloudpickle.dumps(report)
    return pickled


def _print_as_a_terminal() -> None:
    """Has lines, and what ends in a carriage return, be written at once."""
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        stream.reconfigure(line_buffering=True, write_through=False)


def _end_with(parent: int, folder: Path) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
