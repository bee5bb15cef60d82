"""docs/reference/faults.md, and the table that a run prints."""

from collections.abc import Iterator
from typing import Any

from tests import generated
from tests.compat.environments import ROOT

PAGE = ROOT / "docs" / "reference" / "faults.md"
BEGIN, END = "<!-- run: make faults -->", "<!-- end of run -->"
# The characters of a problem that are shown.
SHOWN = 300


def write(found: dict[str, Any]) -> None:
    """Replaces the text between the two marks; the rest of the page is written by hand."""
    generated.write(PAGE, BEGIN, END, [*table(found), *_kinds(found)])


def table(found: dict[str, Any]) -> Iterator[str]:
    """Yields the versions, a row for each part, and what did not hold."""
    yield ", ".join(f"{name} {version}" for name, version in found["versions"].items()) + ".\n"
    yield "| part | kinds | held | tried in all | seconds | day | commit |"
    yield "|---|--:|--:|--:|--:|---|---|"
    parts = found["parts"]
    for name, part in parts.items():
        numbers = " | ".join(f"{number:,}" for number in (*_counts(part), part["seconds"]))
        ended = "" if part["has_ended"] else ", not all of it ran"
        yield f"| {name}{ended} | {numbers} | {part['day']} | `{part['commit']}` |"
    totals = [sum(column) for column in zip(*map(_counts, parts.values()), strict=True)]
    seconds = sum(part["seconds"] for part in parts.values())
    yield f"| all | {' | '.join(f'{number:,}' for number in (*totals, seconds))} | | |"
    failed = [
        f"- {name}: {kind['name']}: {kind['held']} of {kind['tried']}; {_shown(kind['problems'])}"
        for name, part in parts.items()
        for kind in part["kinds"]
        if kind["held"] < kind["tried"]
    ]
    if failed:
        yield "\nNot held:\n"
        yield from failed


def has_held(found: dict[str, Any], parts: list[str]) -> bool:
    """Returns whether all kinds of these parts held."""
    kinds = [kind for name in parts for kind in found["parts"][name]["kinds"]]
    return all(kind["held"] == kind["tried"] for kind in kinds)


def _counts(part: dict[str, Any]) -> tuple[int, int, int]:
    """Returns how many kinds a part has, how many held each time, and how often it tried."""
    kinds = part["kinds"]
    held = sum(kind["held"] == kind["tried"] for kind in kinds)
    return len(kinds), held, sum(kind["tried"] for kind in kinds)


def _kinds(found: dict[str, Any]) -> Iterator[str]:
    """Yields a row with the kinds of each part, with the times if they are more than one."""
    yield "\n| part | kinds |"
    yield "|---|---|"
    for name, part in found["parts"].items():
        names = [
            _plain(kind["name"]) + (f" × {kind['tried']:,}" if kind["tried"] > 1 else "")
            for kind in part["kinds"]
        ]
        yield f"| {name} | {'; '.join(names)} |"


def _shown(problems: list[str]) -> str:
    """Returns the begin of the first problem in one line."""
    return _plain(" ".join(problems[0].split())[:SHOWN]) if problems else ""


def _plain(text: str) -> str:
    """Returns a text in which Markdown has no marks."""
    for mark in "\\`*_<>[]|":
        text = text.replace(mark, f"\\{mark}")
    return text
