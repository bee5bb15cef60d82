"""Tables for people: aligned, the same on a terminal and in a log file."""

import io
from abc import ABC, abstractmethod
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table


@attrs.frozen
class Shown(ABC):
    """A result that prints as its table."""

    @abstractmethod
    def table(self) -> Table:
        """Returns the result as a table."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as plain data, fit for JSON."""
        return attrs.asdict(self)

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        return render(self.table())


def render(table: Table) -> str:
    """Returns `table` as text, without colours and without a limit on its width.

    Example:
        >>> print(render(Table("a", "b")).splitlines()[0][:1])
        ┏
    """
    out = io.StringIO()
    console = Console(file=out, width=10_000, no_color=True)
    console.width = console.measure(table).maximum
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def human_bytes(count: int) -> str:
    """Returns a number of bytes for people.

    Example:
        >>> human_bytes(999), human_bytes(1536), human_bytes(3 * 2**30)
        ('999 B', '1.5 KiB', '3.0 GiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
