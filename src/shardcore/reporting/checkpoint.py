"""The table of `shardcore checkpoint inspect`: what a checkpoint has."""

from typing import Any

import attrs
from rich.table import Table
from rich.text import Text

from shardcore.domain.checkpoints.index import Index
from shardcore.reporting.tables import Column, Shown, build, human_bytes

COLUMNS = (
    Column("variable"), Column("path", "below"), Column("group", "drop"), Column("shape"),
    Column("dtype"), Column("layout", "below"), Column("pieces", "drop", right=True),
    Column("bytes", right=True),
)  # fmt: skip


@attrs.frozen
class Inspection(Shown):
    """The content of a checkpoint.

    Args:
        path: Its folder.
        index: Its index.
    """

    path: str
    index: Index

    def to_dict(self) -> dict[str, Any]:
        """Returns the index as plain data, without the states of generators and data."""
        index = attrs.asdict(self.index)
        del index["state"]
        return {"path": self.path, **index, "user_state": self.index.state.get("user", {})}

    def table(self, width: int | None = None) -> Table:
        """Returns a table with a row per variable, and the sums."""
        index = self.index
        rows = [
            (
                each.name,
                each.path,
                each.group,
                str(each.shape),
                each.dtype,
                each.layout,
                str(len(each.files)),
                human_bytes(each.nbytes),
            )
            for each in index.variables
        ]
        last = (f"{len(rows)} variables", "", "", "", "", "", "", human_bytes(index.nbytes))
        title = f"{self.path}: step {index.step}, saved on mesh {index.mesh}"
        table = build(title, COLUMNS, [*rows, (), last], width)
        versions = ", ".join(f"{name} {version}" for name, version in index.versions.items())
        sizes = human_bytes(sum(file.size for file in index.files))
        table.caption = Text(f"{len(index.files)} files, {sizes}\n{versions}".rstrip())
        return table
