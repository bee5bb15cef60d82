"""What `shardcore.explain()` tells, as a table, as data, and as a file with the picture."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import attrs
from rich.table import Table

from shardcore.domain.errors import StrategyError
from shardcore.domain.explanation.collectives import Collective
from shardcore.reporting.explanation_picture import html, svg
from shardcore.reporting.explanation_words import Explained
from shardcore.reporting.tables import Shown, human_bytes

COLUMNS = ("phase", "layer", "collective", "axis", "operator")
NUMBERS = ("times", "bytes here", "bytes sent")


@attrs.frozen
class Explanation(Explained, Shown):
    """What one step of a model moves between ranks, as this rank saw it."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as plain data, fit for JSON."""
        found = attrs.asdict(self)
        found["mesh"] = None if self.mesh is None else str(self.mesh)
        found["calls"], found["operand_bytes"] = dict(self.calls), dict(self.operand_bytes)
        return found

    def table(self) -> Table:
        """One row per collective, the sums by axis and kind, and the advice."""
        table = Table(title=self.title(), caption="\n".join([self.summary(), *self.advice()]))
        table.caption_justify = "left"
        for name in COLUMNS:
            table.add_column(name)
        for name in NUMBERS:
            table.add_column(name, justify="right")
        table.add_column("reason")
        for _, of_phase in groupby(self.collectives, key=lambda each: each.phase):
            for each in of_phase:
                table.add_row(*_row(each))
            table.add_section()
        for sums in _totals(self.collectives):
            table.add_row(*sums)
        return table

    def save(self, path: str | Path) -> Path:
        """Write the picture: the layers down the page, and the collectives where they happen.

        One rank writes; call it on one.

        Args:
            path: A file that ends in ".svg" or ".html"; the latter has the table too.

        Returns:
            The path.

        Raises:
            StrategyError: If it ends in something else.
        """
        path = Path(path)
        if path.suffix not in (".svg", ".html"):
            raise StrategyError(
                f'An explanation is saved as "step.svg" or "step.html", got {str(path)!r}.'
            )
        picture = svg(self) if path.suffix == ".svg" else html(self, str(self))
        path.write_text(picture, encoding="utf-8")
        return path


def _row(each: Collective) -> tuple[str, ...]:
    return (
        each.phase,
        each.layer or "-",
        each.kind,
        ", ".join(each.axes) or "-",
        each.operator or "-",
        str(each.times),
        human_bytes(each.times * each.operand_bytes),
        human_bytes(each.times * each.sent_bytes),
        each.reason,
    )


def _totals(collectives: Iterable[Collective]) -> list[tuple[str, ...]]:
    """A row for each axis and kind, and one for all."""
    grouped: dict[tuple[str, str], list[Collective]] = {}
    for each in collectives:
        grouped.setdefault((", ".join(each.axes) or "-", each.kind), []).append(each)
    rows = [
        ("in all", "", kind, axis, "", *_sums(grouped[axis, kind]), "")
        for axis, kind in sorted(grouped)
    ]
    return [*rows, ("in all", "", "", "", "", *_sums(collectives), "")]


def _sums(collectives: Iterable[Collective]) -> tuple[str, str, str]:
    return (
        str(sum(each.times for each in collectives)),
        human_bytes(sum(each.times * each.operand_bytes for each in collectives)),
        human_bytes(sum(each.times * each.sent_bytes for each in collectives)),
    )
