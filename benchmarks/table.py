"""The table, and the file beside it."""

import json
import os
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import attrs
from rich import box
from rich.console import Console
from rich.table import Table

import shardcore
from benchmarks import jax_lane
from benchmarks.rows import Row

CAPTION = """\
Times are of one step, the median of rounds in which all contenders of a section take turns.
Ratios of times are the median of the rounds' ratios, which is not always that of the medians.
Peaks are resident memory: of a step above what stays, and of the process above its start.
Keras on JAX: """
JAX = "its two devices share one process, with a core each."
NO_JAX = "not installed (make bench-jax)."
COLUMNS = ("section", "contender", "figure", "ratio", "to", "goal", "")


def show(rows: Sequence[Row], console: Console) -> None:
    """Print one aligned table, and below it what did not run."""
    caption = CAPTION + (JAX if jax_lane.is_installed() else NO_JAX)
    shown = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False)
    for name in COLUMNS:
        right = name in ("figure", "ratio", "goal")
        shown.add_column(name, no_wrap=True, justify="right" if right else "left")
    for section, lines in groupby(rows, lambda row: row.section):
        for number, row in enumerate(lines):
            shown.add_row("" if number else section, *cells(row))
        shown.add_section()
    console.print(shown)
    for row in rows:
        if row.value is None:
            console.print(f"{row.section}: {row.contender}: {row.note}", soft_wrap=True)


def cells(row: Row) -> list[str]:
    """The cells of a row; the section is printed above."""
    figure = "-" if row.value is None else amount(row.value, row.unit)
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    goal = "" if row.limit is None else f"≤ {row.limit:g}"
    note = row.note if row.value is not None else ""
    return [row.contender, figure, ratio, row.against, goal, " ".join([row.verdict, note]).strip()]


def amount(value: float, unit: str) -> str:
    """A figure as a person reads it.

    Example:
        >>> amount(0.0123, "s"), amount(3 * 2**20, "B"), amount(12, "B"), amount(5, "requests")
        ('12.3 ms', '3.0 MiB', '12 B', '5 requests')
        >>> amount(0.0123, "%")
        '1.2 %'
    """
    if unit == "%":
        return f"{value:.1%}".replace("%", " %")
    if unit == "requests":
        return f"{value:.0f} {unit}"
    if unit == "s":
        return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
    return f"{value:.0f} B" if value < 2**16 else f"{value / 2**20:.1f} MiB"


def write(path: Path, rows: Sequence[Row], measured: dict[str, Any], load: float) -> None:
    """Everything that was measured, as JSON."""
    machine = {
        "day": str(date.today()),
        "cores": os.cpu_count(),
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "system": platform.platform(),
        **{name: version(name) for name in ("torch", "keras")},
        "shardcore": shardcore.__version__,  # which may run from its source folder
    }
    facts = {"machine": machine, "rows": [as_dict(row) for row in rows], "measured": measured}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=2))


def as_dict(row: Row) -> dict[str, Any]:
    """A row as plain data."""
    return {**attrs.asdict(row), "verdict": row.verdict}
