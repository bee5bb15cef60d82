"""Runs random programs over ranks and on one device, and prints those whose numbers differ.

python -m tests.fuzz --seconds 600
python -m tests.fuzz --seed 17 --count 1
python -m tests.fuzz --program "Program(layers=(Layer(kind='dense'),))"
"""

import argparse
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Collection

os.environ |= {"KERAS_BACKEND": "torch"}
os.environ.setdefault("SHARDCORE_LOG", "error")

from tests import warm  # after the environment that Keras reads
from tests.fuzz.programs import Program, read
from tests.fuzz.running import Verdict, verdicts
from tests.fuzz.search import drawn, smallest

AT_ONCE = 30  # programs of one launch of ranks
SHRINKING = 240  # seconds at most for a program


def main() -> int:
    """Returns 1 if a program differed."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="how long it searches")
    parser.add_argument("--seed", type=int, help="of the first program; random if not given")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="so many programs at most")
    parser.add_argument("--program", type=read, help="run this one")
    given = parser.parse_args()
    warm.load()
    end = time.monotonic() + given.seconds
    if given.program is not None:
        verdict_of = _judged({"the program": given.program}, end)
    else:
        first = random.randrange(10**6) if given.seed is None else given.seed
        verdict_of = _search(first, given.count, end)
    print("\n".join(_table(verdict_of.values())))
    return int(any(verdict.kind == "differed" for verdict in verdict_of.values()))


def _search(first: int, count: int, end: float) -> dict[Program, Verdict]:
    """Returns the verdicts of the programs of seeds from the first on."""
    verdict_of: dict[Program, Verdict] = {}
    seed = first
    while time.monotonic() < end and seed < first + count:
        after = min(seed + AT_ONCE, first + count)
        verdict_of |= _judged({f"seed {n}": drawn(n) for n in range(seed, after)}, end)
        seed = after
        print(f"seeds {first} to {seed - 1}: {_counts(verdict_of.values())}", flush=True)
    return verdict_of


def _judged(programs: dict[str, Program], end: float) -> dict[Program, Verdict]:
    """Returns the verdicts of programs by name; prints those that differ, and small ones."""
    verdict_of = verdicts(programs.values())
    for name, program in programs.items():
        if verdict_of[program].kind == "refused":
            print(f"{name}: refused: {verdict_of[program].why[:200]}", flush=True)
        elif verdict_of[program].kind == "differed":
            print(f"\n{name} differs: {verdict_of[program].why}\n  {program}", flush=True)
            seconds = min(SHRINKING, end - time.monotonic())
            small, verdict = smallest(program, verdict_of[program], seconds)
            print(f'small: {verdict.why}\n  python -m tests.fuzz --program "{small}"\n', flush=True)
    return verdict_of


def _counts(outcomes: Collection[Verdict]) -> str:
    kinds = Counter(verdict.kind for verdict in outcomes)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def _table(outcomes: Collection[Verdict]) -> list[str]:
    """Returns a row for each kind of verdict and each reason of a refusal, with its count."""
    captured = sum(verdict.captured for verdict in outcomes)
    rows = Counter((verdict.kind, _reason(verdict)) for verdict in outcomes)
    return [
        f"\n{len(outcomes)} programs: {_counts(outcomes)}; {captured} steps ran captured\n",
        "| programs | verdict | why |",
        "|--:|---|---|",
        *(f"| {count} | {kind} | {why} |" for (kind, why), count in rows.most_common()),
    ]


def _reason(verdict: Verdict) -> str:
    """Returns why, without numbers, names and lines if it refuses: equal reasons count as one."""
    text = " ".join(verdict.why.partition(" [")[0].split()).replace("|", "/")
    if verdict.kind == "refused":
        text = re.sub(r"'[^']*'|/\S+", "...", re.sub(r"\d[\d.e+-]*", "n", text))
    return text[:160]


if __name__ == "__main__":
    sys.exit(main())
