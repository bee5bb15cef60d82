"""Puts the figures of the last run into docs/benchmarks.md: python -m benchmarks.page."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import table
from benchmarks.rows import Row

PAGE = Path("docs/benchmarks.md")
FOLDER = Path("build/bench")
BEGIN, END = "<!-- figures: python -m benchmarks.page -->", "<!-- end of figures -->"
HEAD = "| contender | figure | ratio | to | goal | |\n|---|--:|--:|---|--:|---|"


def main() -> None:
    """Write anew what is between the two marks; the rest of the page is written by hand."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    runs = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    figures = "\n".join(line for run in runs for line in lines(run))
    PAGE.write_text(f"{before}{BEGIN}\n{figures}\n{END}{after}")


def lines(run: dict[str, Any]) -> Iterator[str]:
    """One run of a section, in Markdown."""
    rows = [
        Row(**{name: value for name, value in row.items() if name != "verdict"})
        for row in run["rows"]
    ]
    loads = f"{run['machine']['load_before']:.1f} before, {run['machine']['load_after']:.1f} after"
    for section in dict.fromkeys(row.section for row in rows):
        yield f"\n### {section[0].upper()}{section[1:]}\n\nLoad of the machine: {loads}.\n\n{HEAD}"
        yield from (_line(table.cells(row)) for row in rows if row.section == section)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
