"""docs/reference/compatibility.md, from what runs of pairs have found."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tests import generated
from tests.compat import lanes
from tests.compat.lanes import LANES, ROOT

PAGE = ROOT / "docs" / "reference" / "compatibility.md"
BEGIN, END = "<!-- table: make compat-all -->", "<!-- end of table -->"


def write() -> None:
    """Replaces the text between the two marks; the rest of the page is written by hand.

    Results that this checkout has not are those of the page before.
    """
    runs = lanes.results()
    lanes.ON_PAGE.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n")
    generated.write(PAGE, BEGIN, END, lines(runs.values()))


def lines(results: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The table, and below it the tests that failed, in Markdown."""
    runs = sorted(results, key=lambda run: _order(run["versions"]), reverse=True)
    yield f"| torch | Keras | Python | strategy | {' | '.join(LANES)} | run on |"
    yield f"|---|---|---|---|{'---|' * len(LANES)}---|"
    for run in runs:
        of = run["versions"]
        cells = [of["torch"], of["keras"], of["python"], _strategy(run)]
        cells += [_outcome(run["lanes"].get(lane)) for lane in LANES]
        yield f"| {' | '.join([*cells, _run_on(run)])} |"
    for run in runs:
        of = run["versions"]
        failed = [each for lane in run["lanes"].values() for each in lane["failed"]]
        if run["broken"] or failed:
            yield f"\ntorch {of['torch']}, Keras {of['keras']}, Python {of['python']}:\n"
            yield from (f"- {each}" for each in run["broken"])
            yield from (f"- `{each}` failed" for each in failed)


def _order(versions: dict[str, Any]) -> list[int]:
    names = ("torch", "keras", "python")
    texts = ".".join(str(versions.get(each)) for each in names).split(".")
    return [int(each) for each in texts if each.isdigit()]


def _run_on(run: dict[str, Any]) -> str:
    """The day and the commit; if they are not those of all lanes, of each."""
    ran = {name: run["lanes"][name] for name in LANES if name in run["lanes"]}
    whens: dict[str, list[str]] = {}
    for name, each in (ran or {"": run}).items():
        whens.setdefault(f"{each['day']}, `{each['commit']}`", []).append(name)
    if len(whens) == 1:
        return next(iter(whens))
    return "; ".join(f"{', '.join(names)}: {when}" for when, names in whens.items())


def _strategy(run: dict[str, Any]) -> str:
    if "error" in run:
        return "refused"
    reasons = run["passed_over"]
    fell_back = run["strategy"] != "dtensor"
    return f"`{run['strategy']}`: {reasons['dtensor']}" if fell_back else "`dtensor`"


def _outcome(lane: dict[str, Any] | None) -> str:
    if lane is None:
        return "not run"
    parts = {"failed": len(lane["failed"]), "skipped": lane["skipped"]}
    rest = "".join(f", {count} {word}" for word, count in parts.items() if count)
    return f"{lane['passed']} passed{rest}"
