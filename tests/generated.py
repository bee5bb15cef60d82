"""The part of a page that a run generates, between two marks."""

from collections.abc import Iterable
from pathlib import Path


def write(page: Path, begin: str, end: str, lines: Iterable[str]) -> None:
    """Replaces what is between the marks; the rest of the page is written by hand."""
    page.write_text(text(page, begin, end, lines))


def text(page: Path, begin: str, end: str, lines: Iterable[str]) -> str:
    """Returns the page with these lines between the marks."""
    before, _, rest = page.read_text().partition(begin)
    after = rest.partition(end)[2]
    between = "\n".join(lines)
    return f"{before}{begin}\n\n{between}\n\n{end}{after}"
