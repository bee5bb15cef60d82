"""Tables for people, as wide as the terminal at most."""

import io
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap
from typing import Any, ClassVar, Literal

import attrs
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from shardcore.domain.errors import printable

# The least room for the first column, and the most for another one, in a table that is narrowed.
FIRST, OTHER = 22, 18


@attrs.frozen
class Column:
    """A column of a table.

    Args:
        name: Its head.
        narrow: What a narrow table does with it: "keep" it, write it "below" the first column,
            or "drop" it.
        right: Whether its cells are numbers.
    """

    name: str
    narrow: Literal["keep", "below", "drop"] = "keep"
    right: bool = False


def build(
    title: str, columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int | None
) -> Table:
    """Builds a table; an empty row separates sections.

    Args:
        title: What stands above it.
        columns: The columns.
        rows: Their cells.
        width: The columns of text that it may take, None for any number.
    """
    rows = [tuple(map(printable, row)) for row in rows]
    below = [n for n, column in enumerate(columns) if width and column.narrow == "below"]
    kept = [n for n, column in enumerate(columns) if not width or column.narrow == "keep"]
    table, room = Table(title=Text(printable(title), style="table.title")), 0
    if width:
        cells = [[columns[n].name, *(row[n] for row in rows if row)] for n in kept[1:]]
        taken = sum(min(OTHER, max(map(len, texts))) for texts in cells)
        room = max(FIRST, width - taken - 3 * len(kept) - 1)
    for n in kept:
        limit = None if not width else room if n == kept[0] else OTHER
        side: Literal["left", "right"] = "right" if columns[n].right else "left"
        head = [columns[n].name, *(f"  {columns[m].name}" for m in below if n == kept[0])]
        table.add_column("\n".join(head), justify=side, overflow="fold", max_width=limit)
    for row in rows:
        if not row:
            table.add_section()
            continue
        first = [shortened(row[0], room) if room else row[0]]
        first += [f"  {line}" for n in below for line in wrap(row[n], max(1, room - 2))]
        table.add_row(Text("\n".join(first)), *(Text(row[n]) for n in kept[1:]))
    return table


@attrs.frozen
class Report(ABC):
    """A result that prints as its table: all columns where they fit, else a narrow form.

    Attributes:
        derived: The properties that its plain data have besides the fields.
    """

    derived: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def table(self, width: int | None = None) -> Table:
        """Lays the result out as a table of at most `width` columns of text."""

    def to_dict(self) -> dict[str, Any]:
        """Converts the result to plain data, fit for JSON."""
        return attrs.asdict(self) | {name: getattr(self, name) for name in self.derived}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        table, room = self.table(), options.max_width
        needed = console.measure(table, options=options.update(width=10_000)).maximum
        yield table if needed <= room else self.table(room)

    def __str__(self) -> str:
        return self.text(shutil.get_terminal_size().columns)  # 80 without a terminal

    def text(self, width: int) -> str:
        """Prints the table into a text without colours, at most `width` columns wide."""
        out = io.StringIO()
        Console(file=out, width=width, no_color=True).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def shortened(path: str, room: int) -> str:
    """Cuts out the middle of `path`, with an ellipsis, if it is longer than `room`.

    Example:
        >>> shortened("decoder/block_11/attention/query/kernel", 24)
        'decoder/bloc…uery/kernel'
    """
    if len(path) <= room:
        return path
    return f"{path[: room // 2]}…{path[len(path) - (room - 1) // 2 :]}"


def human_bytes(count: int) -> str:
    """Formats a number of bytes for people, in the unit that fits.

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
