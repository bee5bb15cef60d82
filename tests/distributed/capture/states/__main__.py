"""Runs programs that many seeds draw, and prints what is stale: `python -m` and this folder.

Its argument is a number of seeds: 290 programs each, which take a minute and a half.
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")
# A program has too few steps to be captured by default.
os.environ.setdefault("SHARDCORE_CAPTURE", "at-once")

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.capture.states.programs import drawn
from tests.distributed.capture.states.running import Outcome, of_parts, summary, verdicts


def run(_rank, seed):
    shardcore.install("single")
    return verdicts(drawn(seed) if seed else [*of_parts(), *drawn(0)])


def main():
    found = []
    for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        (more,) = run_ranks(run, 1, seed, timeout=1800)
        found += more
        print(f"seed {seed}\n{summary(more)}", flush=True)
    print(f"all\n{summary(found)}")
    wrong = [case for case in found if case.outcome not in (Outcome.FRESH, Outcome.REFUSED)]
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
