"""Compares the bytes that one rank sends in a training step with those that XLA sends.

python -m benchmarks.traffic                                     every layer case
python -m benchmarks.traffic --only LSTM GRU/odd --stored-xla    some, beside stored bytes of XLA
python -m benchmarks.traffic --mesh 1x2 --strategy manual        one mesh, one strategy
python -m benchmarks.traffic --page                              runs nothing

A run of all cases is stored in benchmarks/results, and docs/reference/traffic.md is written from
it. A run of some cases is only printed.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version

# Before Keras and torch are imported.
os.environ["KERAS_BACKEND"] = "torch"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("SHARDCORE_LOG", "error")
os.environ["SHARDCORE_CAPTURE"] = "at-once"

from rich.console import Console

from benchmarks import jax_lane
from benchmarks.traffic import comparison, models, page, stored, table, xla_lane
from benchmarks.traffic.models import MESHES
from benchmarks.traffic.stored import XLA, Answers

STRATEGIES = ("dtensor", "manual")


def main() -> None:
    """Run what was asked for, print it, and write the page if all cases were run."""
    options = _arguments()
    began = time.perf_counter()
    names = [] if options.page else _names(options.only)
    compared = {mesh: _compare(options, mesh, names) for mesh in options.mesh}
    table.show(compared, Console(highlight=False))
    print(f"{(time.perf_counter() - began) / 60:.1f} minutes.")
    if not options.only:
        page.write(STRATEGIES)


def _names(only: Sequence[str]) -> list[str]:
    names = models.select(models.layer_cases(), only)
    known = {*names, *(name.partition("/")[0] for name in names)}
    if unknown := set(only) - known:
        sys.exit(f"no layer case is called {', '.join(sorted(unknown))}")
    return names


def _compare(options: argparse.Namespace, mesh: str, names: Sequence[str]) -> table.Compared:
    """Compare each strategy with XLA on a mesh: what is run now, or what was stored."""
    is_stored = options.stored_xla or not names
    xla = stored.load(XLA, mesh) if is_stored else _run_xla(mesh, names, options.only)
    found = {}
    for strategy in options.strategy:
        ours = (
            _run_shardcore(strategy, mesh, names, options.only)
            if names
            else stored.load(strategy, mesh)
        )
        found[strategy] = comparison.rows(ours, xla)
    return found


def _run_xla(mesh: str, names: Sequence[str], only: Sequence[str]) -> Answers:
    if not jax_lane.is_installed():
        sys.exit("Keras on JAX is not installed: run `make bench-jax`, or give --stored-xla.")
    answers: Answers = {}
    for name, answer in xla_lane.run(MESHES[mesh], names):
        answers[name] = answer
        text = f"\r\033[KXLA, {mesh}: {len(answers)} of {len(names)} {name}"
        print(text, end="", file=sys.stderr, flush=True)
    _end_line()
    if not only:
        stored.store(XLA, mesh, xla_lane.versions(), answers)
    return answers


def _run_shardcore(strategy: str, mesh: str, names: Sequence[str], only: Sequence[str]) -> Answers:
    from benchmarks.traffic import shardcore_ranks  # which imports torch

    cases = models.layer_cases()
    chosen = {name: cases[name] for name in names}
    answers = shardcore_ranks.run(strategy, MESHES[mesh], chosen)
    _end_line()
    if not only:
        versions = {name: version(name) for name in ("shardcore", "torch", "keras")}
        stored.store(strategy, mesh, versions, answers)
    return answers


def _end_line() -> None:
    print("\r\033[K", end="", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.traffic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=[], help="layer classes, or cases")
    parser.add_argument("--mesh", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--stored-xla", action="store_true", help="do not run JAX")
    parser.add_argument("--page", action="store_true", help="run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
