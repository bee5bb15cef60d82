"""The lease of a directory of checkpoints: one job at a time writes into it (ADR 53).

A lease is a folder `.lease` with one empty file, whose name says who has it. A prepared folder is
renamed to it, which fails while it has a file. To take it over from an owner that has ended, the
file is renamed, which succeeds for one process only. Its time, which the owner renews, is that of
the file system: clocks of hosts differ.
"""

import errno
import os
import re
import secrets
import shutil
import socket
import threading
import time
from pathlib import Path

import attrs

from shardcore.domain.errors import CheckpointError
from shardcore.reporting.logs import log_of

logger = log_of("checkpoints")

LEASE = ".lease"
_PREPARED = ".lease-"
RENEWED_EVERY = 5.0  # seconds
PATIENCE = 30.0  # seconds without a renewal, after which an owner on another host counts as dead
_POLL_SECONDS = 0.2
_RETRY_SECONDS = 0.01
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
        """Describes this process by its start, and by the boot and the namespace of its host."""
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64] or "unknown"
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
        space = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
        ticks = _stat(os.getpid())[1]
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return cls(host, os.getpid(), ticks, round(time.time() - age), boot, space, token)

    @classmethod
    def of_name(cls, name: str) -> "Owner | None":
        """Parses the `name` of a process; None if it is none.

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
        """Tells whether the processes of this host are asked whether it lives."""
        return (self.boot, self.space) == (here.boot, here.space)

    def is_alive(self) -> bool:
        """Tells whether a process of this host lives, and is not a later one of its number."""
        try:
            os.kill(self.pid, 0)
            state, ticks = _stat(self.pid)
        except PermissionError:  # of another user: it may be this one
            return True
        except (ProcessLookupError, FileNotFoundError):
            return False
        return ticks == self.ticks and state not in _DEAD


@attrs.define(eq=False)
class Lease:
    """The lease of a directory, from `acquire` until each of its users has released it.

    Args:
        directory: The directory of checkpoints.
        owner: This process.
    """

    directory: Path
    owner: Owner
    _users: int = attrs.field(default=1, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _is_over: threading.Event = attrs.field(factory=threading.Event, init=False)

    @property
    def _file(self) -> Path:
        return self.directory / LEASE / self.owner.name

    def check(self) -> None:
        """Compares the owner on the disk with this process, before a folder is renamed.

        Raises:
            CheckpointError: If another process has taken the lease over.
        """
        if self._is_over.is_set() or not self._file.exists():
            other = owner_of(self.directory)
            by = "it has none now" if other is None else f"{other} has it"
            raise CheckpointError(
                f"This process has lost the lease of {str(self.directory)!r}: {by}. It stood still "
                f"for more than {PATIENCE:.0f} s, or the folder {LEASE} was removed. Nothing was "
                "renamed; give each job another directory.",
                name=str(self.directory),
            )

    def use(self) -> "Lease":
        """Adds a user to this lease; acquires a new one if all have released it."""
        with self._lock:
            if self._users:
                self._users += 1
                return self
        return acquire(self.directory)

    def release(self) -> None:
        """Ends one use; after the last one the directory is free."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self._is_over.set()
        self._file.unlink(missing_ok=True)
        try:
            self._file.parent.rmdir()
        except OSError:  # the next owner has it
            logger.debug("%s has a new owner", self._file.parent)

    def renew(self) -> None:
        """Renews the time of the lease until it is released or lost."""
        while not self._is_over.wait(RENEWED_EVERY):
            try:
                os.utime(self._file)
            except FileNotFoundError:
                return
            except OSError as error:
                logger.debug("the lease could not be renewed: %r", error)


def acquire(directory: Path) -> Lease:
    """Acquires the lease of a directory of checkpoints, which is made if it is missing.

    An owner on this host that has ended does not count. One on another host is waited for until it
    renews its lease, 30 seconds at most.

    Raises:
        CheckpointError: If another process has the lease.
    """
    directory.mkdir(parents=True, exist_ok=True)
    own = Owner.here(secrets.token_hex(8))
    prepared = directory / f"{_PREPARED}{own.name}"
    prepared.mkdir()
    try:
        (prepared / own.name).touch(exist_ok=False)
        _Acquisition(directory, own, prepared).run()
    finally:
        shutil.rmtree(prepared, ignore_errors=True)
    _remove_prepared(directory, own)
    lease = Lease(directory, own)
    threading.Thread(target=lease.renew, name="shardcore-lease", daemon=True).start()
    return lease


def owner_of(directory: Path) -> Owner | None:
    """Finds the process that has the lease of a directory; None if it is free."""
    try:
        names = sorted(os.listdir(directory / LEASE))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return next(filter(None, map(Owner.of_name, names)), None)


@attrs.define(eq=False)
class _Acquisition:
    """The attempts of this process to get a lease, with a `prepared` folder."""

    directory: Path
    own: Owner
    prepared: Path
    _deadline: float = attrs.field(factory=lambda: time.monotonic() + PATIENCE + 1, init=False)
    # The owner on another host that is waited for, with the time of its lease when it was seen.
    _waits: tuple[Owner, float] | None = attrs.field(default=None, init=False)

    def run(self) -> None:
        while not self._take_free():
            other = owner_of(self.directory)
            if other is not None and self._has_ended(other) and self._take_over(other):
                return
            if time.monotonic() > self._deadline:
                raise _refusal(self.directory, other)
            time.sleep(_POLL_SECONDS if self._waits else _RETRY_SECONDS)

    def _take_free(self) -> bool:
        try:
            os.rename(self.prepared, self.directory / LEASE)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return False
        return True

    def _take_over(self, other: Owner) -> bool:
        folder = self.directory / LEASE
        try:
            os.rename(folder / other.name, folder / self.own.name)
            os.utime(folder / self.own.name)
        except FileNotFoundError:
            return False
        logger.info("the lease of %s is taken over: %s has ended", self.directory, other)
        return True

    def _has_ended(self, other: Owner) -> bool:
        """Finds out whether `other` has ended, as far as it is known yet.

        Raises:
            CheckpointError: If it has not.
        """
        if other.is_of_this_host(self.own):
            if other.is_alive():
                raise _refusal(self.directory, other)
            return True
        try:
            renewed = _time_of(self.directory / LEASE / other.name)
        except FileNotFoundError:
            return False
        if self._waits is None or self._waits[0] != other:
            self._waits = other, renewed
            wait = "%s has the lease of %s: waiting up to %.0f s whether it lives"
            logger.warning(wait, other, self.directory, PATIENCE)
        if renewed != self._waits[1]:
            raise _refusal(self.directory, other)
        file = self.prepared / self.own.name
        os.utime(file)
        return _time_of(file) - renewed >= PATIENCE


def _remove_prepared(directory: Path, own: Owner) -> None:
    """Removes what processes of this host have prepared that ended meanwhile."""
    for folder in directory.glob(f"{_PREPARED}*"):
        other = Owner.of_name(folder.name.removeprefix(_PREPARED))
        if other is not None and other.is_of_this_host(own) and not other.is_alive():
            shutil.rmtree(folder, ignore_errors=True)


def _time_of(file: Path) -> float:
    """Reads the time of a file. It is opened, so that no cache of a network answers."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def _stat(pid: int) -> tuple[str, int]:
    """Reads the state of a process, and its start in ticks since the boot."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])  # man 5 proc_pid_stat: starttime is field 22, state is 3


def _refusal(directory: Path, other: Owner | None) -> CheckpointError:
    return CheckpointError(
        f"Expected no other job that writes checkpoints into {str(directory)!r}, but "
        f"{other or 'changing processes'} does: give this job another directory, or end the other "
        "one first."
    )
