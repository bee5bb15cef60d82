"""docs/reference/callbacks.md, from the tests of each callback and what came of them."""

import importlib.metadata
import json
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests import generated

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "callbacks.md"
BEGIN, END = "<!-- table: make loggers -->", "<!-- end of table -->"
# What the page shows of each callback and test: from other checkouts too.
ON_PAGE = Path(__file__).with_name("on_page.json")
PACKAGES = {"keras": "keras", "wandb": "wandb", "mlflow": "mlflow-skinny"}

# A callback by its package and name, and the node of a test of it.
Row = tuple[str, str, str]


def keep(rows: Iterable[Row], outcomes: Mapping[str, list[str]]) -> None:
    """Writes what came of the tests of each row, if they ran; other rows stay as they are."""
    shown = {tuple(row["of"]): row for row in kept()}
    run = {"day": time.strftime("%Y-%m-%d"), "commit": _commit()}
    for package, name, node in rows:
        verdicts = outcomes.get(node, [])
        if verdicts:
            versions = f"{package} {importlib.metadata.version(PACKAGES[package])}"
            counts = {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))}
            of = package, name, node
            shown[of] = {"of": of, "counts": counts, "version": versions, **run}
    there = set(rows)
    rows_left = [shown[row] for row in sorted(shown) if row in there]
    ON_PAGE.write_text(json.dumps(rows_left, indent=1) + "\n")


def kept() -> list[dict]:
    """Reads what came of the tests: a row for each callback and test."""
    return json.loads(ON_PAGE.read_text()) if ON_PAGE.exists() else []


def table() -> Iterator[str]:
    """Yields the lines of the table."""
    yield "| callback | test | outcome | with | run on |"
    yield "|---|---|---|---|---|"
    for row in kept():
        _, name, node = row["of"]
        file, _, test = node.partition("::")
        outcome = ", ".join(f"{count} {verdict}" for verdict, count in row["counts"].items())
        where = f"`{test}` in `{file}`"
        cells = [f"`{name}`", where, outcome, row["version"], f"{row['day']}, `{row['commit']}`"]
        yield f"| {' | '.join(cells)} |"


def write() -> None:
    """Writes the table into the page; the rest of the page is written by hand."""
    generated.write(PAGE, BEGIN, END, table())


def is_up_to_date() -> bool:
    """Tells whether the page has the table of the results that are kept."""
    return PAGE.read_text() == generated.text(PAGE, BEGIN, END, table())


def _commit() -> str:
    shown = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return shown.stdout.strip()
