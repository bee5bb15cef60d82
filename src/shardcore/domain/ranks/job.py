"""The place of this process in its job: rank, world size, and the address of rank 0.

Pure: the environment is an argument. Each value is read from the first source that has it: the
arguments of `keras.distribution.initialize`, the `KERAS_DISTRIBUTION_*` variables of Keras, and
the variables that `torchrun` sets.
"""

from collections.abc import Mapping
from contextlib import suppress
from operator import index

from attrs import field, frozen

from shardcore.domain.errors import EnvironmentProblem

ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
NUM_PROCESSES = "KERAS_DISTRIBUTION_NUM_PROCESSES"
PROCESS_ID = "KERAS_DISTRIBUTION_PROCESS_ID"

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@frozen
class _Setting:
    """A value as it was given, and its source."""

    value: object
    where: str


@frozen
class Job:
    """The place of this process in a job of one or more processes.

    Args:
        rank: This process, `0 <= rank < world_size`.
        world_size: The number of processes.
        local_rank: This process among those of its host; the index of its device.
        master_address: The host name or IP address of rank 0.
        master_port: The TCP port there, 1 to 65535.
        source: For each of the names above, the source of its value.

    Raises:
        EnvironmentProblem: If a value is outside its range.

    Example:
        >>> job = Job(
        ...     rank=1, world_size=2, local_rank=1, master_address="10.0.0.1", master_port=1234
        ... )
        >>> job.rank
        1
    """

    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int
    source: Mapping[str, str] = field(factory=dict, eq=False)

    def __attrs_post_init__(self) -> None:
        self._require("world_size", "at least 1", self.world_size >= 1)
        self._require("rank", f"from 0 to {self.world_size - 1}", 0 <= self.rank < self.world_size)
        self._require(
            "local_rank", f"from 0 to {self.world_size - 1}", 0 <= self.local_rank < self.world_size
        )
        self._require("master_address", "a host name or IP address", bool(self.master_address))
        self._require("master_port", "from 1 to 65535", 1 <= self.master_port <= 65535)

    def _require(self, name: str, expected: str, holds: bool) -> None:
        if not holds:
            where = self.source.get(name, f"the argument {name}")
            raise EnvironmentProblem(
                f"Expected {name} to be {expected} in a job of {self.world_size} processes, "
                f"got {getattr(self, name)!r} from {where}. Correct {where}.",
                got=repr(getattr(self, name)),
            )


def resolve_job(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    environ: Mapping[str, str],
) -> Job | None:
    """Finds the place of this process in its job, as `keras.distribution.initialize` defines it.

    Each value comes from the first source that has it:

    | value | argument | `KERAS_DISTRIBUTION_…` | torchrun |
    |---|---|---|---|
    | address | `job_addresses` | `JOB_ADDRESSES` | `MASTER_ADDR`, `MASTER_PORT` |
    | world size | `num_processes` | `NUM_PROCESSES` | `WORLD_SIZE` |
    | rank | `process_id` | `PROCESS_ID` | `RANK` |

    The local rank is `LOCAL_RANK` if that is set. Otherwise it is derived: with one address per
    process, it is the number of earlier processes on the same host. With a single address on the
    loopback, which no other host can reach, it is the rank. Else it is 0: one process per host.

    Args:
        job_addresses: Comma-separated `host:port` of every process in the order of ranks, or of
            rank 0 alone. IPv6 is written `[::1]:1234`.
        num_processes: The world size. It must equal the number of addresses if there are two or
            more, and may then be left out.
        process_id: The rank.
        environ: The environment variables, usually `os.environ`. An empty one counts as unset.

    Returns:
        The job. None for a single process: no rank, no world size and no Keras addresses are
        given, or a world size of 1 without an address.

    Raises:
        EnvironmentProblem: If a value is missing, malformed, or contradicts another.

    Example:
        >>> resolve_job(environ={}) is None
        True
        >>> job = resolve_job("10.0.0.1:1234,10.0.0.2:2345", process_id=1, environ={})
        >>> job.rank, job.world_size, job.master_address, job.master_port
        (1, 2, '10.0.0.1', 1234)
        >>> job.source["world_size"]
        'the number of addresses in the argument job_addresses'
    """
    addresses = _find("job_addresses", job_addresses, environ, ADDRESSES)
    size = _find("num_processes", num_processes, environ, NUM_PROCESSES, "WORLD_SIZE")
    rank = _find("process_id", process_id, environ, PROCESS_ID, "RANK")
    if addresses is None and size is None and rank is None:
        return None
    hosts = [] if addresses is None else _hosts(addresses)
    size = _world_size(size, hosts, addresses)
    world_size = _integer(size)
    if world_size == 1 and not hosts and not environ.get("MASTER_ADDR"):
        return None
    if rank is None:
        if world_size != 1:
            raise _missing("the rank of this process", "process_id", PROCESS_ID, "RANK", size)
        rank = _Setting(0, "the only rank of 1 process")
    if not hosts:
        addresses, hosts = _torchrun_address(environ, size)
    assert addresses is not None
    local_rank = _local_rank(_integer(rank), world_size, hosts, environ)
    source = {"rank": rank.where, "world_size": size.where, "local_rank": local_rank.where}
    source |= {"master_address": addresses.where, "master_port": addresses.where}
    address, port = hosts[0]
    return Job(_integer(rank), world_size, _integer(local_rank), address, port, source)


def launched_job(environ: Mapping[str, str]) -> Job | None:
    """Resolves the job of the launcher; also None for an error, which joining the job shows."""
    with suppress(EnvironmentProblem):
        return resolve_job(environ=environ)
    return None


def rank_variables(shared: Mapping[str, str], rank: int) -> dict[str, str]:
    """Adds a rank of this host to the variables that all of them share, as torchrun does."""
    return {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def _find(name: str, argument: object, environ: Mapping[str, str], *names: str) -> _Setting | None:
    if argument is not None:
        return _Setting(argument, f"the argument {name}")
    return next(
        (_Setting(environ[variable], variable) for variable in names if environ.get(variable)), None
    )


def _integer(setting: _Setting) -> int:
    value = setting.value
    if not isinstance(value, bool):
        with suppress(TypeError, ValueError):
            return int(value) if isinstance(value, str) else index(value)  # type: ignore[arg-type]
    raise EnvironmentProblem(
        f"Expected an integer from {setting.where}, got {value!r}. Correct {setting.where}.",
        got=repr(value),
    )


def _hosts(addresses: _Setting) -> list[tuple[str, int]]:
    if not isinstance(addresses.value, str):
        raise EnvironmentProblem(
            f"Expected one string from {addresses.where}, got {addresses.value!r}. "
            "Join the addresses with commas: 'host0:1234,host1:1234'.",
            got=repr(addresses.value),
        )
    return [_host(address.strip(), addresses.where) for address in addresses.value.split(",")]


def _host(address: str, where: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host_ok = bool(host.strip("[]")) and (bracketed or ":" not in host)
    if not host_ok or not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise EnvironmentProblem(
            f"Expected every address as host:port with a port from 1 to 65535, got {address!r} "
            f"from {where}. Write it like 'host0:1234', IPv6 like '[::1]:1234'.",
            got=repr(address),
        )
    return host.strip("[]"), int(port)


def _world_size(
    size: _Setting | None, hosts: list[tuple[str, int]], addresses: _Setting | None
) -> _Setting:
    """Takes the given world size, or counts addresses; several must be one per process."""
    if size is None:
        if len(hosts) > 1 and addresses is not None:
            return _Setting(len(hosts), f"the number of addresses in {addresses.where}")
        raise _missing("the number of processes", "num_processes", NUM_PROCESSES, "WORLD_SIZE")
    if len(hosts) > 1 and len(hosts) != _integer(size) and addresses is not None:
        raise EnvironmentProblem(
            f"Expected one address per process, got {len(hosts)} addresses from {addresses.where} "
            f"and {_integer(size)} processes from {size.where}. Give one address for each "
            "process, or only that of the first.",
            got=str(len(hosts)),
        )
    return size


def _torchrun_address(
    environ: Mapping[str, str], size: _Setting
) -> tuple[_Setting, list[tuple[str, int]]]:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host or not port:
        raise _missing(
            "the address of rank 0", "job_addresses", ADDRESSES, "MASTER_ADDR and MASTER_PORT", size
        )
    address = _Setting(host, "MASTER_ADDR and MASTER_PORT")
    return address, [(host, _integer(_Setting(port, "MASTER_PORT")))]


def _local_rank(
    rank: int, world_size: int, hosts: list[tuple[str, int]], environ: Mapping[str, str]
) -> _Setting:
    if environ.get("LOCAL_RANK"):
        return _Setting(environ["LOCAL_RANK"], "LOCAL_RANK")
    names = [host for host, _ in hosts]
    if len(names) == world_size:
        earlier = names[:rank].count(names[rank]) if 0 <= rank < world_size else 0
        return _Setting(earlier, "the earlier addresses with this host")
    if names[0] in _LOOPBACK:
        return _Setting(
            rank, "the rank, as every process must be on the host of a loopback address"
        )
    return _Setting(0, "the assumption of one process per host, as LOCAL_RANK is not set")


def _missing(
    what: str, argument: str, keras_name: str, torchrun_name: str, size: _Setting | None = None
) -> EnvironmentProblem:
    job = "a job of several processes" if size is None else f"a job of {size.value} processes"
    origin = "" if size is None else f" (from {size.where})"
    return EnvironmentProblem(
        f"Expected {what} for {job}{origin}, got none. Pass {argument}= to "
        f"keras.distribution.initialize, set {keras_name}, or start with torchrun, which sets "
        f"{torchrun_name}. For one device, give none of a job's values."
    )
