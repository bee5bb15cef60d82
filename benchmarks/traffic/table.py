"""Prints what was compared: a summary, and the worst cases of each mesh."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.traffic.comparison import DEFAULT, EAGER, Row, Summary, ratio, summarize, worst
from benchmarks.traffic.sent_bytes import Traffic

WORST = 20
SUMMARY = ("mesh", "strategy", "step", "≤ XLA", "mean", "collectives : XLA", "XLA 0", "eager")
CAPTION = """\
≤ XLA: cases in which a rank sends at most as many bytes as under XLA.
mean: the geometric mean of the ratios of bytes.
XLA 0: cases in which XLA sends nothing and shardcore does; not in the mean.
eager: cases whose default step was not captured; their eager step counts in its place.
"""
# By strategy: the rows of one mesh.
Compared = Mapping[str, Sequence[Row]]


def show(compared: Mapping[str, Compared], console: Console) -> None:
    """Print the summary of all meshes, and the worst cases of each.

    Args:
        compared: By mesh and strategy.
        console: That is printed to.
    """
    table = _table(SUMMARY)
    for cells in summary(compared):
        table.add_row(*cells)
    console.print(table)
    console.print(CAPTION)
    for mesh, strategies in compared.items():
        console.print(f"Mesh {mesh}: the highest ratios, with the bytes that one rank sends")
        table = _table(("case", "XLA", *_columns(strategies)))
        for case in worst(strategies.values())[:WORST]:
            table.add_row(*cells_of(case, strategies))
        console.print(table)


def summary(compared: Mapping[str, Compared]) -> list[tuple[str, ...]]:
    """Lay out a line for each mesh, strategy and kind of step."""
    found = []
    for mesh, strategies in compared.items():
        for (strategy, rows), kind in product(strategies.items(), (DEFAULT, EAGER)):
            sums = summarize(rows, kind)
            eager = str(sums.not_captured) if kind == DEFAULT else ""
            found.append((mesh, strategy, kind, *summary_cells(sums), eager))
    return found


def summary_cells(found: Summary) -> tuple[str, ...]:
    """Lay out a summary, behind its mesh, strategy and step.

    Example:
        >>> summary_cells(Summary(388, 300, 0.987, 40, 2, 1, 1700, 2072, 4))
        ('300 of 388', '0.99', '1,700 : 2,072', '2')
    """
    calls = f"{found.calls:,} : {found.xla_calls:,}"
    at_most = f"{found.at_most} of {found.cases}"
    return at_most, f"{found.mean:.2f}", calls, str(found.only_ours)


def cells_of(case: str, strategies: Compared) -> list[str]:
    """Lay out a case: the bytes of XLA, then bytes and ratio of each strategy."""
    found = [next((r for r in rows if r.case == case), None) for rows in strategies.values()]
    cells = [case, size(next(row.xla for row in found if row))]
    for row in found:
        cells += [size(row.default), ratio_text(row.default, row.xla)] if row else ["", ""]
    return cells


def size(traffic: Traffic) -> str:
    """Write bytes.

    Example:
        >>> size(Traffic(2032.0)), size(Traffic(48.0, at_least=True))
        ('2,032', '≥ 48')
    """
    return f"{'≥ ' if traffic.at_least else ''}{traffic.sent:,.0f}"


def ratio_text(ours: Traffic, xla: Traffic) -> str:
    """Write a ratio.

    Example:
        >>> ratio_text(Traffic(3), Traffic(2)), ratio_text(Traffic(3), Traffic(0))
        ('1.50', '∞')
    """
    found = ratio(ours, xla)
    return "∞" if found == math.inf else f"{found:.2f}"


def _columns(strategies: Compared) -> list[str]:
    return [column for name in strategies for column in (name, "ratio")]


def _table(columns: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        is_name = name in ("mesh", "strategy", "step") or not number
        table.add_column(name, justify="left" if is_name else "right", overflow="fold")
    return table
