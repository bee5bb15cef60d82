"""The outcomes of Keras' own tests: judged, and kept from run to run."""

import fnmatch
import functools
import importlib.metadata
import json
import platform
import subprocess
import time
from collections import Counter
from typing import Any

import attrs

from tests.compat.environments import ROOT
from tests.keras_tests import running
from tests.keras_tests.reasons import CANNOT
from tests.keras_tests.variants import prepare

RESULTS = ROOT / "build" / "keras-tests" / "results.json"


@attrs.frozen
class FileResult:
    """The outcomes of the tests of a file in a variant.

    Attributes:
        counts: Of tests by kind: "passed", "skipped" as Keras skips them, "refused" by an error of
            shardcore, "plain" where plain Keras fails too, "cannot" for a reason of `reasons.py`,
            and "failed".
        errors: The message of each test that was refused or failed, by "kind: name".
        seconds: What the run took.
        day, commit: When it ran.
    """

    counts: dict[str, int]
    errors: dict[str, str]
    seconds: int
    day: str
    commit: str

    def failures(self) -> list[str]:
        """Returns a line for each test that failed without a reason."""
        return [f"{name}: {error}" for name, error in self.errors.items() if name[:6] == "failed"]

    def summary(self) -> str:
        """Returns the counts in words."""
        return ", ".join(f"{count} {kind}" for kind, count in self.counts.items() if count)


def run_file(variant: str, file: str) -> FileResult:
    """Runs the tests of a file below `keras/src` in a variant."""
    began = time.monotonic()
    outcome_of = running.outcomes_on_ranks(file, functools.partial(prepare, variant))
    failed = [name for name, outcome in outcome_of.items() if outcome.startswith("failed")]
    plain = _plain_outcomes(file, failed)
    kind_of = {
        name: _kind(variant, name, outcome, plain.get(name, ""))
        for name, outcome in outcome_of.items()
    }
    errors = {
        f"{kind}: {file}::{name}": outcome_of[name]
        for name, kind in kind_of.items()
        if kind in ("refused", "failed")
    }
    seconds = round(time.monotonic() - began)
    counts = dict(Counter(kind_of.values()))
    return FileResult(counts, errors, seconds, time.strftime("%Y-%m-%d"), _commit())


def store(variant: str, file: str, result: FileResult) -> None:
    """Keeps a result; those of other files stay if they have the same versions."""
    results = load()
    results["variants"].setdefault(variant, {})[file] = attrs.asdict(result)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1))


def load() -> dict[str, Any]:
    """Returns the results that are kept, by variant and file, and their versions."""
    now = {name: importlib.metadata.version(name) for name in ("keras", "torch")}
    now["python"] = platform.python_version()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return results if results.get("versions") == now else {"versions": now, "variants": {}}


def _kind(variant: str, name: str, outcome: str, plain_outcome: str) -> str:
    kind = outcome.partition(":")[0]
    if kind == "failed" and plain_outcome.startswith("failed"):
        return "plain"
    if kind == "failed" and any(
        fnmatch.fnmatch(variant, variants) and fnmatch.fnmatch(name, names)
        for variants, names, _ in CANNOT
    ):
        return "cannot"
    return kind


def _plain_outcomes(file: str, names: list[str]) -> dict[str, str]:
    """Runs some tests of a file in plain Keras."""
    if not names:
        return {}
    chosen = " or ".join(name.replace("::", " and ") for name in names if " " not in name)
    return running.outcomes(file, lambda: None, chosen)


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
