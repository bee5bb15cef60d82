"""The lanes of tests that a pair of releases has to pass, and what came of them."""

import json
import os
import signal
import subprocess
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.compat import tests_of_keras
from tests.compat.environments import ROOT, Pair, cache, python_of, site_packages

RESULTS = ROOT / "build" / "compat"
# The results that the page shows, by the name of their file: of other machines and checkouts too.
ON_PAGE = ROOT / "tests" / "compat" / "on_page.json"
# The seconds that an interrupted pytest has to write its report.
TO_REPORT_SECONDS = 30
COUNTS = sorted(
    f"{each.relative_to(ROOT)}" for each in ROOT.glob("tests/distributed/traffic/test_moved_*.py")
)
# The test files of each lane. The files in tests/matrix run about a tenth of the matrices.
LANES: dict[str, tuple[str, ...]] = {
    "unit": ("tests/unit", "src", "--doctest-modules"),
    "contract": ("tests/distributed/strategies/test_contract.py",),
    "counts": tuple(COUNTS),
    "keras": ("tests/distributed/keras_distribution/test_keras_own_tests.py",),
    "matrix": ("tests/matrix",),
}


def run(pair: Pair, lanes: Iterable[str]) -> bool:
    """Runs the lanes on the pair, and returns whether all passed.

    The outcome is kept in build/compat, beside those that the page shows of other lanes with the
    same versions. If `install()` refuses, it runs no lane.
    """
    python = python_of(pair)
    tests_of_keras.add(site_packages(python))
    found = _probe(python)
    for each in found["broken"]:
        print(f"{pair.name}: {each}", flush=True)
    kept = RESULTS / f"{cache().name}-{pair.name}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    before = results().get(kept.stem, {})
    now = {"day": time.strftime("%Y-%m-%d"), "commit": _commit()}
    found |= {**now, "lanes": {}}
    if before.get("versions") == found["versions"]:
        found["lanes"] = before["lanes"]
    if "error" not in found:
        for lane in lanes:
            found["lanes"][lane] = now | _run(python, lane, found["strategy"])
            kept.write_text(json.dumps(found, indent=1))
    kept.write_text(json.dumps(found, indent=1))
    bad = [each for of in found["lanes"].values() for each in of["failed"]]
    return not bad and "error" not in found


def results() -> dict[str, dict[str, Any]]:
    """The results that the page shows, and those of this checkout in place of older ones."""
    found: dict[str, dict[str, Any]] = json.loads(ON_PAGE.read_text()) if ON_PAGE.exists() else {}
    for file in RESULTS.glob("*.json"):
        before, ran = found.get(file.stem, {}), json.loads(file.read_text())
        same = before.get("versions") == ran["versions"]
        found[file.stem] = ran | {"lanes": (before["lanes"] if same else {}) | ran["lanes"]}
    return found


def _probe(python: Path) -> dict[str, Any]:
    ran = subprocess.run(
        [python, "-m", "tests.compat.probe"],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        return {"versions": {}, "broken": [], "error": ran.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def _run(python: Path, lane: str, strategy: str) -> dict[str, Any]:
    """Runs a lane; without DTensor under the other strategy, and no test that names it."""
    chosen = [] if strategy == "dtensor" else ["-k", "not dtensor"]
    given = {"SHARDCORE_TEST_STRATEGY": strategy, "SHARDCORE_MATRIX_STRATEGY": strategy}
    return outcome(python, [*LANES[lane], *chosen], _environment() | given, RESULTS)


def outcome(
    python: str | Path,
    tests: Iterable[str],
    environment: dict[str, str],
    folder: Path,
    limit: float | None = None,
    at_a_time: int = 2,
) -> dict[str, Any]:
    """Runs tests, and returns what failed, how many passed and were skipped, and the seconds.

    After `limit` seconds pytest is interrupted, and reports the tests that have ended.
    """
    report = folder / "junit.xml"
    report.unlink(missing_ok=True)
    pytest = [python, "-m", "pytest", "-q", "-n", f"{at_a_time}", "--dist", "worksteal"]
    began = time.monotonic()
    code = within([*pytest, f"--junitxml={report}", *tests], environment, limit)
    cases = reported(folder)
    verdicts = [case.verdict for case in cases]
    names = [case.name for case in cases if case.verdict == "failed"]
    return {
        "failed": [*names, *([f"not all of it ran in {limit} s"] if code is None else [])],
        "skipped": verdicts.count("skipped"),
        "passed": verdicts.count("passed"),
        "seconds": round(time.monotonic() - began),
    }


@dataclass(frozen=True)
class Case:
    """A test that has run: its name, and "passed", "failed" or "skipped"."""

    name: str
    verdict: str


def reported(folder: Path) -> list[Case]:
    """Returns the tests in the report that `outcome` has left in a folder."""
    report = folder / "junit.xml"
    found = ET.parse(report).getroot().iter("testcase") if report.exists() else ()
    return [Case(f"{case.get('classname')}::{case.get('name')}", _verdict(case)) for case in found]


def _verdict(case: ET.Element) -> str:
    tags = {part.tag for part in case}
    if {"failure", "error"} & tags:
        return "failed"
    return "skipped" if "skipped" in tags else "passed"


def within(
    command: Iterable[str | Path], environment: dict[str, str], limit: float | None
) -> int | None:
    """Runs a command, and returns its exit code, None if it did not end in `limit` seconds.

    Then it is interrupted, and has a while to end. What is left of its process group is killed.
    """
    # A shell has its background jobs ignore interrupts, and they would pass this on.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(list(command), cwd=ROOT, env=environment, start_new_session=True)
    signal.signal(signal.SIGINT, handler)
    with process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(TO_REPORT_SECONDS)
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    return os.environ | {"KERAS_BACKEND": "torch", "PYTHONPATH": path}


def _commit() -> str:
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        asked, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
