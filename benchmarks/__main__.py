"""Measures, and prints one table.

python -m benchmarks                        everything
python -m benchmarks --only decoder small   some sections
"""

import argparse
import os
import sys
import time
from pathlib import Path

# Before Keras and torch are imported. The sections of this process measure the CPU only.
os.environ["KERAS_BACKEND"] = "torch"
os.environ["OMP_NUM_THREADS"] = "1"
# A contender runs fewer steps than a training: captured steps are what is measured.
os.environ["SHARDCORE_CAPTURE"] = "at-once"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("SHARDCORE_LOG", "warning")

from rich.console import Console

from benchmarks import table
from benchmarks.sections import SECTIONS, Options

# Of the table at most; in a narrower terminal its lines go on below, and no figure is cut off.
WIDTH = 180


def main() -> None:
    """Run the sections in turn; the exit code is 1 where something did not run."""
    given = _arguments()
    console = Console(highlight=False, width=WIDTH)
    began, load, rows = time.perf_counter(), os.getloadavg()[0], []
    for name in given.only:
        options = Options(given.quick, given.rounds, given.strategy, tuple(given.without))
        found = list(SECTIONS[name](options))
        table.write(given.folder / f"{name}.json", found, options.measured, load)
        rows += found
    table.show(rows, console)
    minutes = (time.perf_counter() - began) / 60
    console.print(f"{minutes:.1f} minutes. Load before: {load:.1f}. Every round: {given.folder}.")
    sys.exit(any(row.value is None for row in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="small sizes: does everything run?")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--strategy", default="auto", help="of shardcore, on two ranks")
    parser.add_argument("--without", nargs="+", default=[], help="leave out, by a part of a name")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/bench"), help="of the JSON files"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
