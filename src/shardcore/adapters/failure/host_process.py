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
        >>> own = HostProcess.own()
        >>> own.is_gone(), own.is_running()
        (False, True)
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
        return self._state() in "ZX"

    def is_running(self) -> bool:
        """Returns whether the process has neither ended nor is stopped; it is of this host."""
        return self._state() not in "ZXTt"

    def _state(self) -> str:
        """Returns the letter of its state in /proc; "X", dead, if there is no such process."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return "X"
        return text.rpartition(")")[2].split()[0]
