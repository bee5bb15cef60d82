"""The process of a rank: other ranks of its host see when it ends."""

import os
from pathlib import Path

from attrs import frozen


@frozen
class HostProcess:
    """A process, and its host, within which its number is unique.

    Args:
        host: A name of the host for process numbers; empty if it is unknown.
        pid: The number of the process.

    Example:
        >>> HostProcess.own().is_gone()
        False
    """

    host: str
    pid: int

    @classmethod
    def own(cls) -> "HostProcess":
        """Returns this process."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            host = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            host = ""
        return cls(host, os.getpid())

    def is_gone(self) -> bool:
        """Returns whether the process has ended; it is of this host."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "ZX"
