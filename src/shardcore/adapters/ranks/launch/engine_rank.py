"""An engine of ipyparallel that is a rank: the errors of its cells, and its end."""

import os
import signal
import threading
import time
from typing import Any

from shardcore.adapters.ranks.processes import TorchProcesses

_LOOK_SECONDS = 1.0


def follow_cells(processes: TorchProcesses) -> None:
    """Publishes to the other ranks the error with which a cell has ended here."""
    from IPython import get_ipython

    def report(result: Any) -> None:
        processes.report_cell_error(result.error_in_exec or result.error_before_exec)

    shell = get_ipython()
    shell.events.register("pre_execute", lambda: processes.report_cell_error(None))
    shell.events.register("post_run_cell", report)


def end_with(notebook: int) -> None:
    """Ends this process when that of the notebook has ended, as its kernel may be killed."""
    threading.Thread(
        target=_end_with, args=(notebook,), name="shardcore-notebook", daemon=True
    ).start()


def _end_with(notebook: int) -> None:
    while _is_alive(notebook):
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
