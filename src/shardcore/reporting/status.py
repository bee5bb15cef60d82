"""The results of `shardcore.status()`, and of `status()` of a notebook's engines."""

from collections.abc import Sequence

import attrs
from rich.table import Table

from shardcore.domain.cost.collective_cost import ranks_by_host
from shardcore.reporting.tables import Column, Report, build

ENGINE_COLUMNS = (
    Column("rank", right=True), Column("engine", right=True), Column("process", right=True),
    Column("device"), Column("state"),
)  # fmt: skip


@attrs.frozen
class Status(Report):
    """The state of shardcore in this process.

    Args:
        installed: Whether shardcore is installed into Keras.
        strategy: The strategy that was chosen, None if shardcore is not installed.
        passed_over: The reasons against the other strategies, by name.
        mesh_shape: The shape of the mesh of the distribution that is set, None without one.
        axis_names: The names of its axes.
        devices: Every device of the job, in the order of the ranks.
        rank: The rank of this process.
        world_size: The number of processes.
        versions: The versions of Python, shardcore, Keras and torch.
        hosts: The name of the host of each rank.

    Example:
        >>> axes = ("data", "model")
        >>> status = Status(True, "dtensor", {}, (1, 2), axes, ("cpu:0", "cpu:1"), 0, 2, {})
        >>> dict(zip(status.axis_names, status.mesh_shape)), status.rank
        ({'data': 1, 'model': 2}, 0)
    """

    installed: bool
    strategy: str | None
    passed_over: dict[str, str]
    mesh_shape: tuple[int, ...] | None
    axis_names: tuple[str, ...] | None
    devices: tuple[str, ...]
    rank: int
    world_size: int
    versions: dict[str, str | None]
    hosts: tuple[str, ...] = ()

    def table(self, width: int | None = None) -> Table:
        """Builds a table of two columns, whose cells wrap."""
        table = Table("what", "value", title="shardcore")
        table.add_row("strategy", self.strategy or "none: call shardcore.install()")
        for name, reason in self.passed_over.items():
            table.add_row(f"not {name}", reason)
        table.add_row("mesh", self._mesh())
        table.add_row("devices", ", ".join(self.devices))
        table.add_row("rank", f"{self.rank} of {self.world_size}")
        for host, ranks in ranks_by_host(self.hosts).items():
            table.add_row(f"host {host}", _runs(ranks))
        for package, version in self.versions.items():
            table.add_row(package, version or "not installed")
        return table

    def _mesh(self) -> str:
        if self.mesh_shape is None or self.axis_names is None:
            return "none: no distribution is set"
        axes = zip(self.axis_names, self.mesh_shape, strict=True)
        return ", ".join(f"{name}={size}" for name, size in axes)


@attrs.frozen
class EngineRank:
    """A rank, and the engine that is it.

    Args:
        rank: The rank.
        engine: The number of the engine in its cluster.
        process: The number of its process.
        device: The device on which it computes.
        state: "waits for a cell", "runs a cell" or "has ended".
    """

    rank: int
    engine: int
    process: int
    device: str
    state: str


@attrs.frozen
class EnginesStatus(Report):
    """The ranks of a notebook.

    Args:
        ranks: They, in their order.

    Example:
        >>> rank = EngineRank(0, engine=0, process=4711, device="cpu:0", state="runs a cell")
        >>> EnginesStatus((rank,)).to_dict()["ranks"][0]["state"]
        'runs a cell'
    """

    ranks: tuple[EngineRank, ...]

    def table(self, width: int | None = None) -> Table:
        """Builds a table with a row for each rank."""
        rows = [tuple(map(str, attrs.astuple(rank))) for rank in self.ranks]
        return build("ranks", ENGINE_COLUMNS, rows, width)


def _runs(ranks: Sequence[int]) -> str:
    """Writes ranks for people, those in a row by the first and the last: "ranks 0 to 3, 8"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"
