"""The owner of a lease: a process, named so that others find out whether it lives."""

import os
import re
import socket
import time
from pathlib import Path

import attrs

_TICKS_AT = 19  # the index of the start among the fields of /proc/PID/stat after the name
_DEAD = ("Z", "X", "x")  # states of a process that has ended; its parent has not asked for it


@attrs.frozen
class Owner:
    """A process. Its number is used again after its end, so its start is a part of its name.

    Args:
        host: The name of its host.
        pid: Its number, as it knows it itself.
        ticks: Its start, in ticks since the host was booted.
        started: Its start, in seconds since 1970.
        boot: The boot of its host: a number that is drawn at each.
        space: The namespace of process numbers that it is in: each container has one.
        token: A random word, which makes each lease different.
    """

    host: str
    pid: int
    ticks: int
    started: int
    boot: str
    space: str
    token: str

    @classmethod
    def here(cls, token: str) -> "Owner":
        """Returns this process."""
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64] or "unknown"
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
        space = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
        ticks = _stat(os.getpid())[1]
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        started = round(time.time() - age)
        return cls(host, os.getpid(), ticks, started, boot, space, token)

    @classmethod
    def of_name(cls, name: str) -> "Owner | None":
        """Returns the process whose `name` this is; None if it is none.

        Example:
            >>> owner = Owner("node-1", 12, 345, 1764259200, "b0", "9", "a1")
            >>> Owner.of_name(owner.name) == owner
            True
        """
        parts = name.split("_")
        patterns = (r"[A-Za-z0-9.-]+", r"\d{1,10}", r"\d{1,20}", r"\d{1,12}", *[r"[0-9a-f]+"] * 3)
        if len(parts) != len(patterns) or not all(map(re.fullmatch, patterns, parts)):
            return None
        host, pid, ticks, started, boot, space, token = parts
        return cls(host, int(pid), int(ticks), int(started), boot, space, token)

    @property
    def name(self) -> str:
        """The process as the name of a file."""
        return "_".join(map(str, attrs.astuple(self)))

    def __str__(self) -> str:
        start = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.started))
        return f"process {self.pid} on host {self.host!r}, started {start}"

    def is_of_this_host(self, here: "Owner") -> bool:
        """Returns whether the processes of this host are asked whether it lives."""
        return (self.boot, self.space) == (here.boot, here.space)

    def is_alive(self) -> bool:
        """Returns whether a process of this host lives, and is not a later one of its number."""
        try:
            os.kill(self.pid, 0)
            state, ticks = _stat(self.pid)
        except PermissionError:  # of another user: it may be this one
            return True
        except (ProcessLookupError, FileNotFoundError):
            return False
        return ticks == self.ticks and state not in _DEAD


def _stat(pid: int) -> tuple[str, int]:
    """Returns the state of a process, and its start in ticks since the boot."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[_TICKS_AT])
