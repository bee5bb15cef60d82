"""The result of `shardcore.explain()`: as a table, as data, and as a file with the picture."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import attrs
from rich.table import Table
from rich.text import Text

from shardcore.domain.cost.collectives import Collective, Explained
from shardcore.domain.errors import ArgumentProblem
from shardcore.domain.inspection import rules_as_code
from shardcore.reporting.cost.plan import PlanReport
from shardcore.reporting.inspection.picture import html, svg
from shardcore.reporting.tables import Column, Report, build, human_bytes

COLUMNS = (
    Column("layer"), Column("collective"), Column("axis"), Column("operator", "drop"),
    Column("times", right=True), Column("bytes here", "drop", right=True),
    Column("bytes sent", right=True), Column("reason", "below"),
)  # fmt: skip


@attrs.frozen
class Explanation(Explained, Report):
    """The collectives of one step of a model, as seen by one rank.

    Args:
        model: The model's name.
        step: "train", "test" or "predict".
        mesh: The mesh; None if no distribution is set.
        strategy: The strategy's name; empty if no distribution is set.
        rank: That rank of the mesh.
        layers: The layers that the step called, in the order of the first calls.
        collectives: The collectives of the step, in order; equal ones once, with their number.
        avoidable: Collectives that another rule would avoid, with the rule.
        layouts: The rule that decides the layout of each variable; None without a distribution.

    Example:
        >>> explanation = Explanation("net", "train", None, "", 0, layers=(), collectives=())
        >>> print(explanation.title())
        one train step of model 'net': no distribution is set
        >>> dict(explanation.calls), explanation.avoidable
        ({}, ())
    """

    layouts: PlanReport | None = None

    def title(self) -> str:
        """Names the model, the step, the strategy, the mesh and the rank, in one line."""
        where = "no distribution is set"
        if self.mesh is not None:
            where = f"strategy {self.strategy}, mesh {self.mesh}, rank {self.rank}"
        return f"one {self.step} step of model {self.model!r}: {where}"

    def summary(self) -> str:
        """Counts the collectives and their bytes, in one line."""
        if not self.collectives:
            why = ": no distribution is set" if self.mesh is None else ""
            if self.mesh is not None and self.mesh.size == 1:
                why = ": the mesh is of one device"
            return f"Nothing is moved between ranks{why}."
        calls, size = sum(self.calls.values()), sum(self.operand_bytes.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.calls.items())
        return f"{calls} collectives ({kinds}) on {human_bytes(size)} of this rank."

    def advice(self) -> tuple[str, ...]:
        """Writes one line for each avoidable collective."""
        return tuple(
            f"Avoidable: {advice.problem}. Instead: {rules_as_code(advice.rules)}. "
            f"Then {advice.effect}."
            for advice in self.avoidable
        )

    def to_dict(self) -> dict[str, Any]:
        """Converts it to plain data, fit for JSON."""
        moved = {"calls": dict(self.calls), "operand_bytes": dict(self.operand_bytes)}
        return {**super().to_dict(), "mesh": None if self.mesh is None else str(self.mesh), **moved}

    def table(self, width: int | None = None) -> Table:
        """Builds a table with a row per collective, the sums by axis and kind, and the advice."""
        rows: list[tuple[str, ...]] = []
        for _, of_phase in groupby(self.collectives, key=lambda collective: collective.phase):
            rows += [_row(collective) for collective in of_phase]
            rows.append(())
        rows += _sums_by_axis_and_kind(self.collectives)
        columns = COLUMNS if width else (Column("phase"), *COLUMNS)
        table = build(self.title(), columns, _by_phase(rows) if width else rows, width)
        table.caption = Text("\n".join([self.summary(), *self.advice()]))
        table.caption_justify = "left"
        return table

    def save(self, path: str | Path) -> Path:
        """Writes the picture: the layers down the page, each with its collectives.

        One rank writes; call it on one.

        Args:
            path: A file that ends in ".svg" or ".html"; the latter has the table too.

        Returns:
            The path.

        Raises:
            ArgumentProblem: If it ends in something else.
        """
        path = Path(path)
        if path.suffix not in (".svg", ".html"):
            raise ArgumentProblem(
                name="Explanation.save(path)",
                expected='a file that ends in ".svg" or ".html"',
                got=repr(str(path)),
            )
        picture = svg(self, self.title(), self.summary())
        page = picture if path.suffix == ".svg" else html(self.title(), picture, self.text(10_000))
        path.write_text(page, encoding="utf-8")
        return path


def _by_phase(rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yields the rows without their phase, which is a row before the first of them."""
    before = ""
    for row in rows:
        if row and row[0] != before:
            before = row[0]
            yield (before.upper(), *[""] * (len(row) - 2))
        yield row[1:]


def _row(collective: Collective) -> tuple[str, ...]:
    return (
        collective.phase,
        collective.layer or "-",
        collective.kind,
        ", ".join(collective.axes) or "-",
        collective.operator or "-",
        str(collective.times),
        human_bytes(collective.times * collective.operand_bytes),
        human_bytes(collective.times * collective.sent_bytes),
        collective.reason,
    )


def _sums_by_axis_and_kind(collectives: Iterable[Collective]) -> list[tuple[str, ...]]:
    grouped: dict[tuple[str, str], list[Collective]] = {}
    for collective in collectives:
        grouped.setdefault((", ".join(collective.axes) or "-", collective.kind), []).append(
            collective
        )
    rows = [
        ("in all", "", kind, axis, "", *_sums(grouped[axis, kind]), "")
        for axis, kind in sorted(grouped)
    ]
    return [*rows, ("in all", "", "", "", "", *_sums(collectives), "")]


def _sums(collectives: Iterable[Collective]) -> tuple[str, str, str]:
    return (
        str(sum(collective.times for collective in collectives)),
        human_bytes(sum(collective.times * collective.operand_bytes for collective in collectives)),
        human_bytes(sum(collective.times * collective.sent_bytes for collective in collectives)),
    )
