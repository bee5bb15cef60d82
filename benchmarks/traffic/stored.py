"""Stores what runs found in benchmarks/results, one file for XLA and one for each strategy.

They are kept in the repository, so the page can be written again, and a strategy compared with XLA,
where JAX is not installed.
"""

import json
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

FOLDER = Path("benchmarks/results")
XLA = "xla"
Answers = dict[str, dict[str, Any]]


def store(who: str, mesh: str, versions: Mapping[str, str], answers: Answers) -> None:
    """Replace the results of one mesh; those of other meshes stay.

    Args:
        who: `XLA`, or a strategy of shardcore.
        mesh: Its name.
        versions: Of the libraries that took part.
        answers: By case.
    """
    meshes = {**_read(who), mesh: {"day": str(date.today()), **versions, "cases": answers}}
    _file(who).parent.mkdir(parents=True, exist_ok=True)
    _file(who).write_text(_lines(meshes))


def load(who: str, mesh: str) -> Answers:
    """Read the results of one mesh by case; nothing if it was not run."""
    return dict(_read(who).get(mesh, {}).get("cases", {}))


def origin(who: str, mesh: str) -> str:
    """Tell when a mesh was run, and with which versions; "" if it was not."""
    facts = {name: fact for name, fact in _read(who).get(mesh, {}).items() if name != "cases"}
    return ", ".join([facts.pop("day"), *(f"{n} {v}" for n, v in facts.items())]) if facts else ""


def one_line(text: str) -> str:
    """Shorten a text to one line without colors and without folders, which differ by machine.

    Example:
        >>> one_line("no rule\\n for it at /a/folder/keras/ops.py:5")
        'no rule for it at ops.py:5'
    """
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    return re.sub(r"/\S*/", "", " ".join(plain.split()))[:300]


def _read(who: str) -> dict[str, Any]:
    return dict(json.loads(_file(who).read_text())) if _file(who).exists() else {}


def _file(who: str) -> Path:
    return FOLDER / f"traffic-{who}.json"


def _lines(meshes: Mapping[str, Any]) -> str:
    """Write JSON with a line for each case, so that a change of one is a change of one line."""
    parts = []
    for mesh, found in meshes.items():
        facts = [f"  {json.dumps(n)}: {json.dumps(f)}," for n, f in found.items() if n != "cases"]
        cases = [f"   {json.dumps(n)}: {json.dumps(a)}" for n, a in found["cases"].items()]
        head = [f" {json.dumps(mesh)}: {{", *facts, '  "cases": {']
        parts.append("\n".join([*head, ",\n".join(cases), "  }", " }"]))
    return "{\n" + ",\n".join(parts) + "\n}\n"
