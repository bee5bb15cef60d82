"""Trains one model three times, on one device and in two layouts, and compares the results."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from comparison import LOSS_TOLERANCE, WEIGHT_TOLERANCE, Run, table
from rich.console import Console

TRAIN = str(Path(__file__).with_name("train.py"))
PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
RUNS = {
    "one device": [*PYTHON, TRAIN, "--plain"],
    "mesh (1, 2), tensor parallel": [*TORCHRUN, TRAIN, "--mesh", "1", "2"],
    "mesh (2, 1), data parallel": [*TORCHRUN, TRAIN, "--mesh", "2", "1"],
}
INTRODUCTION = """\
Trains one Keras model three times: on one device, and on two processes in two
layouts. Each training takes about ten seconds on an idle machine.
Text: the documentation that ships with Python. Model: a decoder of two blocks.
The program is examples/train.py; the model is in examples/decoder.py."""
ENDING = f"""\
Ranks add in another order: losses may differ by {LOSS_TOLERANCE:.0e}, weights by \
{WEIGHT_TOLERANCE:.0e}.
Bytes are the memory of one rank; collectives are those of one step.
All processes share this machine: numbers must agree, but do not come sooner."""


def main():
    options = _options()
    console = Console(highlight=False, width=max(80, Console().width))
    console.print(INTRODUCTION)
    began = time.monotonic()
    runs = []
    for name, command in RUNS.items():
        console.rule(f"[bold]{name}", align="left")
        sizes = ["--epochs", str(options.epochs), "--windows", str(options.windows)]
        runs.append(train(name, [*command, *sizes]))
    console.print(table(runs))
    console.print(ENDING)
    agree = all(run.agrees_with(runs[0]) for run in runs)
    if options.json:
        facts = {"agree": agree, "runs": [run.to_dict(runs[0]) for run in runs]}
        Path(options.json).write_text(json.dumps(facts, indent=2))
    verdict = "[green]The three agree" if agree else "[red]They do NOT agree"
    console.print(f"[bold]{verdict}[/], after {time.monotonic() - began:.0f} seconds.")
    sys.exit(not agree)


def train(name, command):
    """Run `command` on this terminal, one thread per process, and read what it reports."""
    with tempfile.TemporaryDirectory() as folder:
        # It has few steps, and shows the collectives of captured ones.
        own = {"OMP_NUM_THREADS": "1", "SHARDCORE_CAPTURE": "at-once"}
        environment = {**os.environ, **own}
        done = subprocess.run([*command, "--report", folder], env=environment, check=False)
        if done.returncode != 0:
            sys.exit(f"The run on {name} failed with exit code {done.returncode}.")
        return Run.read(name, folder)


def _options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--windows", type=int, default=512, help="how many, of 64 bytes each")
    parser.add_argument("--json", metavar="FILE", help="write the facts of the table there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
