"""The table of `shardcore checkpoint inspect`: what a checkpoint has."""

from typing import Any

import attrs
from rich.table import Table
from rich.text import Text

from shardcore.domain.checkpoints.index import Index, StoredVariable
from shardcore.domain.errors import printable
from shardcore.reporting.tables import Column, Report, build, human_bytes

COLUMNS = (
    Column("variable"), Column("path", "below"), Column("group", "drop"), Column("shape"),
    Column("dtype"), Column("layout", "below"), Column("pieces", "drop", right=True),
    Column("bytes", right=True),
)  # fmt: skip


# Of a model with more variables the table has so many, which are laid out in a second.
MOST_ROWS = 1000


@attrs.frozen
class Inspection(Report):
    """The content of a checkpoint.

    Args:
        path: Its folder.
        index: Its index.
    """

    path: str
    index: Index

    def to_dict(self) -> dict[str, Any]:
        """Converts the index to plain data, without the states of generators and data."""
        index = self.index
        return {
            "path": self.path,
            "step": index.step,
            "mesh": index.mesh,
            "versions": dict(index.versions),
            "variables": [_fields(variable) for variable in index.variables],
            "files": [attrs.asdict(file) for file in index.files],
            "user_state": index.state.get("user", {}),
        }

    def table(self, width: int | None = None) -> Table:
        """Builds a table with a row per variable, and the sums."""
        index = self.index
        rows: list[tuple[str, ...]] = [
            (
                variable.name,
                variable.path,
                variable.group,
                str(variable.shape),
                variable.dtype,
                variable.layout,
                str(len(variable.files)),
                human_bytes(variable.nbytes),
            )
            for variable in index.variables[:MOST_ROWS]
        ]
        left = len(index.variables) - len(rows)
        if left:
            rows.append((f"... and {left} more, in --json", *[""] * (len(COLUMNS) - 1)))
        count = f"{len(index.variables)} variables"
        last = (count, "", "", "", "", "", "", human_bytes(index.nbytes))
        title = f"{self.path}: step {index.step}, saved on mesh {index.mesh}"
        table = build(title, COLUMNS, [*rows, (), last], width)
        versions = ", ".join(f"{name} {version}" for name, version in index.versions.items())
        sizes = human_bytes(sum(file.size for file in index.files))
        caption = f"{len(index.files)} files, {sizes}\n{versions}"
        table.caption = Text(printable(caption.rstrip()))
        return table


def _fields(variable: StoredVariable) -> dict[str, Any]:
    """Converts a variable to plain data; `attrs.asdict` takes ten times as long."""
    names = ("name", "path", "group", "dtype", "layout", "files")
    grid = {"shape": variable.grid.shape, "cuts": variable.grid.cuts}
    return {name: getattr(variable, name) for name in names} | {"grid": grid}
