"""Runs a part of the matrices, or all, and writes what is stored into docs/reference/coverage.md.

One class on one mesh takes seconds:

    python -m tests.matrix run --only Conv2D --mesh 1x2
    python -m tests.matrix run --table ops --only softmax
    python -m tests.matrix run --table "captured layers" --mesh "one device" --only Conv2D

What was run whole is kept in build/matrix, table by table and mesh by mesh, for the page:

    python -m tests.matrix run --table layers --mesh 2x2
    python -m tests.matrix page                    # all of it
    python -m tests.matrix page --table layers     # the section of one table
"""

import argparse
import os
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SHARDCORE_CAPTURE", "at-once")

from tests.matrix import page, stored, strategies  # after the backend is named
from tests.matrix.outcomes import Outcome
from tests.matrix.suite import TABLES, unexpected


def main() -> int:
    """Returns whether a case failed."""
    parser = argparse.ArgumentParser("python -m tests.matrix", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["run", "page", "list"])
    parser.add_argument("--table", choices=TABLES, action="append", help="else all of them")
    parser.add_argument("--mesh", default="", help="the beginning of its name, else all of them")
    parser.add_argument("--only", action="append", help="a class, a function or a case")
    parser.add_argument("--strategy", choices=("dtensor", "manual"), default="dtensor")
    options = parser.parse_args()
    os.environ[strategies.VARIABLE] = options.strategy
    if options.what == "page":
        page.write(options.table)
        return 0
    bad = 0
    for name in options.table or TABLES:
        for mesh in TABLES[name].meshes():
            if not mesh.startswith(options.mesh):
                continue
            if options.what == "list":
                print(f"{name}: {mesh}")
            else:
                bad += _run(name, mesh, options.only)
    return 1 if bad else 0


def _run(name: str, mesh: str, only: list[str] | None) -> int:
    began = time.monotonic()
    table = TABLES[name]
    found = table.run(mesh, table.named(only) if only else None)
    if not found:
        return 0
    if not only:
        stored.keep(name, mesh, found)
    bad = {case: o for case, o in found.items() if o.status in ("error", "WRONG")}
    for case, outcome in found.items() if only else bad.items():
        print(_line(case, outcome))
    seconds = time.monotonic() - began
    counts = stored.counts(found.values())
    print(f"{name}, {mesh}: {len(found)} cases in {seconds:.0f} s: {counts}", flush=True)
    return len(unexpected(found))


def _line(case: str, outcome: Outcome) -> str:
    return f"{outcome.status}: {case} {' '.join(outcome.fell_back)}{outcome.detail}"


if __name__ == "__main__":
    sys.exit(main())
