"""Prints what came of models of keras-hub over two ranks, a line for each use.

.venv-hub/bin/python -m tests.hub --model OPT --layout tensor_parallel
"""

import argparse
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from shardcore.testing import RankFailed  # after the backend is named
from tests.hub.activities import ACTIVITIES, MESHES, compare, is_offered
from tests.hub.models import CASES


def main() -> int:
    """Returns whether a use failed."""
    parser = argparse.ArgumentParser("python -m tests.hub", description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=CASES, action="append", help="else all of them")
    parser.add_argument("--layout", choices=MESHES, action="append", help="else all of them")
    parser.add_argument("--use", choices=ACTIVITIES, action="append", help="else all of them")
    options = parser.parse_args()
    failed = False
    for name in options.model or CASES:
        for layout in options.layout or MESHES:
            for use in options.use or ACTIVITIES:
                if not is_offered(name, layout, use):
                    continue
                try:
                    outcome = compare(name, layout, (use,))[use]
                except RankFailed as error:
                    failed, found = True, str(error).strip().splitlines()[-1]
                else:
                    failed |= not outcome.is_close
                    found = "ok" if outcome.is_close else f"differs by {outcome.difference:.1e}"
                    found += f"; eager: {outcome.eager}" if outcome.eager else ""
                print(f"{name} | {layout} | {use} | {found}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
