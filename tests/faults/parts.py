"""The parts of `make faults`: what each tries, and the results that are kept."""

import importlib.metadata
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import attrs

from tests.compat.environments import ROOT
from tests.faults import kills, launches, page, processes, saves, soak
from tests.faults.files import checkpoint_files, hostile_files
from tests.faults.kinds import Kind

RESULTS = ROOT / "build" / "faults" / "found.json"


@attrs.frozen
class Amounts:
    """The times that each part tries its kinds.

    Args:
        training_kills: Kills of a training with each kind of checkpoint.
        save_kills: Kills in each way to save, on one rank and on two.
        damaged: Damaged checkpoints that are loaded.
        forged: Forged checkpoints that the commands read.
        launches: Launches after an error, and after an interrupt.
        minutes: Minutes of training in the soak.
    """

    training_kills: int = 20
    save_kills: int = 200
    damaged: int = 1000
    forged: int = 10_000
    launches: int = 50
    minutes: float = 60.0


Part = Callable[[Amounts], Iterator[Kind]]
PARTS: dict[str, Part] = {
    "kills": lambda amounts: kills.kinds(amounts.training_kills),
    "signals": lambda _: processes.kinds("signals"),
    "ranks": lambda _: processes.kinds("ranks"),
    "disks": lambda _: processes.kinds("disks"),
    "launches": lambda amounts: chain(
        launches.kinds(amounts.launches), processes.kinds("launches")
    ),
    "files": lambda amounts: chain(
        checkpoint_files.kinds(amounts.damaged), hostile_files.kinds(amounts.forged)
    ),
    "saves": lambda amounts: saves.kinds(amounts.save_kills),
    "soak": lambda amounts: soak.kinds(amounts.minutes),
}


def run(chosen: Iterable[str], amounts: Amounts) -> dict[str, Any]:
    """Runs parts, and writes each kind at once, and the page after each part.

    Parts that do not run have the results of their last run with these versions.
    """
    now = {"day": time.strftime("%Y-%m-%d"), "commit": _commit()}
    found: dict[str, Any] = {"versions": _versions(), "parts": {}}
    if RESULTS.exists():
        earlier = json.loads(RESULTS.read_text())
        found = earlier if earlier["versions"] == found["versions"] else found
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        print(f"part {name}", flush=True)
        began, kinds = time.monotonic(), []
        for kind in _kinds(PARTS[name], amounts):
            kinds.append(attrs.asdict(kind))
            seconds = round(time.monotonic() - began)
            found["parts"][name] = now | {"seconds": seconds, "has_ended": False, "kinds": kinds}
            RESULTS.write_text(json.dumps(found, indent=1))
        found["parts"][name]["has_ended"] = True
        found["parts"] = {part: found["parts"][part] for part in PARTS if part in found["parts"]}
        RESULTS.write_text(json.dumps(found, indent=1))
        page.write(found)
    return found


def _kinds(part: Part, amounts: Amounts) -> Iterator[Kind]:
    """Yields the kinds of a part; if it fails, that too."""
    try:
        yield from part(amounts)
    except Exception as error:  # noqa: BLE001 - it is reported
        yield Kind.once("the rest of the part", f"{type(error).__name__}: {error}")


def _versions() -> dict[str, str]:
    names = {"Keras": "keras", "torch": "torch"}
    found = {name: importlib.metadata.version(package) for name, package in names.items()}
    return found | {"Python": platform.python_version()}


def _commit() -> str:
    """Returns the commit, and whether files differ from it, the page aside."""
    commit = _git("rev-parse", "--short", "HEAD")
    others = ("--", ".", f":!{page.PAGE.relative_to(ROOT)}")
    changed = _git("status", "--porcelain", "--untracked-files=no", *others)
    return f"{commit} and changes" if changed else commit


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
