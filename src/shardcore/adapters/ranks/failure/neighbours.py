"""The neighbours of a rank: the other ranks of its host, of which it sees the processes."""

import os
from pathlib import Path
from uuid import uuid4

import attrs

from shardcore.adapters.ranks.failure import store
from shardcore.adapters.ranks.job import exchange


@attrs.frozen
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
        """Identifies this process, by the boot and the namespace of its host."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            host = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            host = ""
        return cls(host, os.getpid())

    def is_gone(self) -> bool:
        """Tells whether a process of this host has ended, also one that is not reaped yet."""
        return self._state() in "ZX"

    def is_running(self) -> bool:
        """Tells whether a process of this host has neither ended nor is stopped."""
        return self._state() not in "ZXTt"

    def _state(self) -> str:
        """Reads the letter of its state from /proc; "X", dead, if there is no such process."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return "X"
        except OSError:  # this process may have no file left; the next look is a second later
            return "R" if self._has_number() else "X"
        return text.rpartition(")")[2].split()[0]

    def _has_number(self) -> bool:
        """Tells whether a process has this number, also one that has ended and is not reaped."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # of another user
            return True
        return True


@attrs.define
class Neighbours:
    """The other ranks of this host.

    Args:
        rank: This rank.
        processes: The processes of the others, by rank.
    """

    rank: int
    processes: dict[int, HostProcess]

    @classmethod
    def meet(cls, rank: int) -> tuple["Neighbours", str]:
        """Finds the neighbours, and a new name that all ranks get. All ranks call it together.

        Ranks of a host send equal values, but for rank 0: a rank reads one for each host. The
        ranks on the host of the store are noted.
        """
        own, shared = HostProcess.own(), exchange.store()
        shared.set(f"pid/{rank}", str(own.pid).encode())
        name = uuid4().hex if rank == 0 else ""
        everyone = exchange.gather((name, own.host, store.host_is_here()))
        store.remember_host_ranks(
            [other for other, (_, _, has_store) in enumerate(everyone) if has_store]
        )
        near = [
            other
            for other, (_, host, _) in enumerate(everyone)
            if other != rank and host == own.host != ""
        ]
        pids = shared.get([f"pid/{other}" for other in near])
        processes = (HostProcess(own.host, int(pid)) for pid in pids)
        return cls(rank, dict(zip(near, processes, strict=True))), everyone[0][0]

    def gone(self) -> list[int]:
        """Lists the ranks whose processes have ended."""
        # A copy: a thread that publishes a failure may forget ranks meanwhile.
        return [rank for rank, process in list(self.processes.items()) if process.is_gone()]

    def forget(self, rank: int) -> None:
        """Leaves out a rank that has ended in order."""
        self.processes.pop(rank, None)

    def lower(self) -> list[int]:
        """Lists the ranks of this host below this one."""
        return [rank for rank in list(self.processes) if rank < self.rank]

    def is_first(self) -> bool:
        """Tells whether this is the lowest rank of its host that runs."""
        others = list(self.processes.items())
        return not any(process.is_running() for rank, process in others if rank < self.rank)
