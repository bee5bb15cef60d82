"""Puts the figures of the last run into docs/reference/benchmarks.md: python -m benchmarks.page.

Sections that were not run stay as they are, with the day on which they were.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import table
from benchmarks.rows import Row

PAGE = Path("docs/reference/benchmarks.md")
FOLDER = Path("build/bench")
BEGIN, END = "<!-- figures: python -m benchmarks.page -->", "<!-- end of figures -->"
HEAD = "| contender | figure | ratio | to | goal | |\n|---|--:|--:|---|--:|---|"


def main() -> None:
    """Replaces the text between the two marks; the rest of the page is written by hand."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    figures = sections(rest.partition(END)[0])
    for path in sorted(FOLDER.glob("*.json")):
        figures |= sections("\n".join(lines(json.loads(path.read_text()))))
    text = "\n\n".join(figures.values())
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def sections(figures: str) -> dict[str, str]:
    """The sections of a page by their titles.

    Example:
        >>> sections("### MLP\\n\\na table\\n\\n### CNN\\n\\nanother\\n")
        {'MLP': '### MLP\\n\\na table', 'CNN': '### CNN\\n\\nanother'}
    """
    found = (f"### {each}".strip() for each in f"\n{figures}".split("\n### ")[1:])
    return {each.partition("\n")[0].removeprefix("### "): each for each in found}


def lines(run: dict[str, Any]) -> Iterator[str]:
    """One run of a section, in Markdown."""
    rows = [
        Row(**{name: value for name, value in row.items() if name != "verdict"})
        for row in run["rows"]
    ]
    machine = run["machine"]
    loads = f"{machine['load_before']:.1f} before, {machine['load_after']:.1f} after"
    for section in dict.fromkeys(row.section for row in rows):
        yield f"\n### {section[0].upper()}{section[1:]}\n"
        yield f"Run on {machine['day']}. Load of the machine: {loads}.\n\n{HEAD}"
        yield from (_line(table.cells(row)) for row in rows if row.section == section)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
