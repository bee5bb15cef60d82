"""Prints what came of models of keras-hub over two ranks, a line for each use.

.venv-hub/bin/python -m tests.hub --model OPT --layout tensor_parallel
"""

import argparse
import os
import re
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SHARDCORE_CAPTURE", "at-once")

from shardcore.testing import RankFailed  # after the backend is named
from tests.hub import page
from tests.hub.activities import ACTIVITIES, MESHES, alone, compare, is_offered
from tests.hub.models import CASES


def main() -> int:
    """Returns 1 if a use failed."""
    parser = argparse.ArgumentParser("python -m tests.hub", description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=CASES, action="append", help="else all of them")
    parser.add_argument("--layout", choices=MESHES, action="append", help="else all of them")
    parser.add_argument("--use", choices=ACTIVITIES, action="append", help="else all of them")
    parser.add_argument("--page", action="store_true", help="write docs/reference/keras-hub.md")
    options = parser.parse_args()
    findings = []
    for layout in options.layout or MESHES:
        for name in options.model or CASES:
            for use in options.use or ACTIVITIES:
                if is_offered(name, layout, use):
                    findings.append(finding(name, layout, use))
                    page.keep(name, layout, use, findings[-1])
                    print(f"{name} | {layout} | {use} | {findings[-1]}", flush=True)
    if options.page:
        page.write()
    return int(not all(each.startswith("ok") for each in findings))


def finding(name: str, layout: str, use: str) -> str:
    """Returns what came of a use, in a line; the whole of an error is printed."""
    try:
        alone(name, (use,))
    except RankFailed as error:
        return f"one device fails: {_last_line(error)}"
    try:
        outcome = compare(name, layout, (use,))[use]
    except RankFailed as error:
        return f"error: {_last_line(error)}"
    if not outcome.is_close:
        return f"difference: {outcome.difference:.1e}"
    return f"ok, eager: {outcome.eager}" if outcome.eager else "ok"


def _last_line(error: RankFailed) -> str:
    """Returns the line that names an error, and prints the whole of it."""
    print(error, file=sys.stderr)
    lines = str(error).strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]+Error: ", line)]
    return (named or lines)[-1]


if __name__ == "__main__":
    sys.exit(main())
