"""The part of a page that a run generates, between two marks."""

from collections.abc import Iterable
from pathlib import Path


def write(page: Path, begin: str, end: str, lines: Iterable[str]) -> None:
    """Replaces what is between the marks; the rest of the page is written by hand."""
    before, _, rest = page.read_text().partition(begin)
    after = rest.partition(end)[2]
    text = "\n".join(lines)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
