"""Outcomes of whole runs, stored in build/matrix from one command to the next."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import attrs

from tests.matrix import strategies
from tests.matrix.outcomes import ORDER, Outcome

FOLDER = Path(__file__).parents[2] / "build" / "matrix"


def keep(table: str, mesh: str, found: dict[str, Outcome]) -> None:
    """Keep what a table came to on a mesh."""
    _file(table, mesh).parent.mkdir(parents=True, exist_ok=True)
    lines = {case: attrs.asdict(outcome) for case, outcome in found.items()}
    _file(table, mesh).write_text(json.dumps(lines, indent=0))


def kept(table: str, mesh: str) -> dict[str, Outcome]:
    """The stored outcomes of a table on a mesh; empty if it was not run."""
    file = _file(table, mesh)
    if not file.exists():
        return {}
    return {case: _outcome(**each) for case, each in json.loads(file.read_text()).items()}


def _outcome(fell_back: list[str], **others: str) -> Outcome:
    return Outcome(fell_back=tuple(fell_back), **others)


def _file(table: str, mesh: str) -> Path:
    folder = FOLDER if strategies.name() == "dtensor" else FOLDER / strategies.name()
    return folder / f"{table} on {mesh}.json"


def counts(outcomes: Iterable[Outcome]) -> str:
    """Counts by outcome: "9 ok, 2 fell back"."""
    found = Counter(outcome.status for outcome in outcomes)
    return ", ".join(f"{found[status]} {status}" for status in ORDER if found[status])


def counts_of_batches(outcomes: Iterable[Outcome]) -> str:
    """Counts by outcome on even and on uneven batches, each with the share that is ok."""
    found = []
    for kind in ("even", "uneven"):
        statuses = Counter(status for each in outcomes if (status := getattr(each, kind)))
        if statuses:
            share = 100 * statuses["ok"] / statuses.total()
            cells = ", ".join(f"{statuses[name]} {name}" for name in ORDER if statuses[name])
            found.append(f"{kind} batches {cells} ({share:.1f} % ok)")
    return "; ".join(found)
