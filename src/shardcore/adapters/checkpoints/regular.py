"""Regular files: no others are opened, as a pipe never ends and a device may do anything."""

import os
import stat
from pathlib import Path

from shardcore.domain.errors import CheckpointError


def open_descriptor(path: Path) -> int:
    """Returns a descriptor of a regular file, open for reading. A link to one is followed.

    Raises:
        CheckpointError: If it is something else.
        OSError: If it cannot be opened.
    """
    check(path)
    # It may have become a pipe since the check: the opening does not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refusal(path)
    return descriptor


def check(path: Path) -> os.stat_result:
    """Returns the status of a regular file.

    Raises:
        CheckpointError: If it is something else.
        OSError: If there is none.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(path)
    return status


def read(path: Path, most: int) -> bytes:
    """Returns the content of a regular file of at most `most` bytes.

    Raises:
        CheckpointError: If it is something else, or has more bytes.
        OSError: If it cannot be read.
    """
    with os.fdopen(open_descriptor(path), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise CheckpointError(f"File {str(path)!r} has more than {most} bytes.")
    return content


def _refusal(path: Path) -> CheckpointError:
    return CheckpointError(
        f"Expected a regular file, but {str(path)!r} is none: pipes, devices and folders are not "
        "read."
    )
