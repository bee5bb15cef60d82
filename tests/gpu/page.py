"""docs/reference/gpu.md, from what a run on GPUs has found."""

from collections.abc import Iterator
from typing import Any

from benchmarks.table import amount
from tests import generated
from tests.compat.environments import ROOT

PAGE = ROOT / "docs" / "reference" / "gpu.md"
BEGIN, END = "<!-- run: make gpu -->", "<!-- end of run -->"


def write(found: dict[str, Any]) -> None:
    """Replaces the text between the two marks; the rest of the page is written by hand."""
    generated.write(PAGE, BEGIN, END, lines(found))


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yields the machine, the outcome of each part, what failed, and the figures."""
    machine = found["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in machine if name != "devices")
    yield f"{machine['devices']}; {versions}; {found['day']}.\n"
    yield "| part | passed | failed | skipped | seconds |"
    yield "|---|--:|--:|--:|--:|"
    for part, of in found["parts"].items():
        counts = (of["passed"], len(of["failed"]), of["skipped"], of["seconds"])
        yield f"| {part} | {' | '.join(map(str, counts))} |"
    failed = [each for of in found["parts"].values() for each in of["failed"]]
    if failed:
        yield "\nFailed:\n"
        yield from (f"- `{each}`" for each in failed)
    if found["figures"]:
        yield "\n| benchmark | contender | step | beside |"
        yield "|---|---|--:|---|"
        yield from map(_figure, found["figures"])


def _figure(row: dict[str, Any]) -> str:
    value = row["note"] if row["value"] is None else amount(row["value"], row["unit"])
    beside = "" if row["ratio"] is None else f"{row['ratio']:.2f} × {row['against']}"
    return f"| {row['section']} | {row['contender']} | {value} | {beside} |"
