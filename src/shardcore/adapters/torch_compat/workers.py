"""The threads that gloo runs collectives on, at the end of the interpreter."""

import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_LOOK_SECONDS = 0.002


def wait_for_workers(timeout: float = 10.0) -> None:
    """Wait until no thread of gloo has anything to put away.

    torch 2.13 (pytorch issue 190489): the thread that ran a collective lets go of its tensors a
    moment after the waiting rank went on, and needs the interpreter for it. If that ends
    meanwhile, the process aborts with "terminate called without an active exception". Destroying
    the groups does not end their threads, which the caches of DTensor keep. The number of
    unfinished works has no public name; a thread that sleeps, twice in a row, has none, or one
    that nobody has waited for and another rank has not come to.

    Args:
        timeout: Seconds after which to go on in any case.
    """
    deadline = time.monotonic() + timeout
    idle = 0
    while idle < 2 and time.monotonic() < deadline:
        # Sleeping gives the interpreter to a thread that waits for it.
        time.sleep(_LOOK_SECONDS)
        idle = 0 if any(map(_is_busy, _tasks())) else idle + 1


def _tasks() -> list[Path]:
    """The threads of this process, where the system shows them: on Linux."""
    return list(Path("/proc/self/task").glob("*"))


def _is_busy(task: Path) -> bool:
    try:
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # the thread has ended
        return False
    return name == _NAME and rest.split()[0] != "S"
