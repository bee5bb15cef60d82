"""The command line: its words, its help, and how its arguments are read."""

import argparse
import ast
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

from shardcore import __version__
from shardcore.bootstrap import plugins
from shardcore.cli import checkpoints
from shardcore.domain.errors import ShardcoreError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports.policy import PolicyEntry
from shardcore.ports.strategy import StrategyEntry

DEFAULT_FUNCTION = "build"

EXAMPLES = """\
examples:
  shardcore status                        the strategy in use here, and why
  shardcore plan model.py --mesh 2x4      a layout for build() of model.py
  shardcore explain model.py --mesh 2x4   what a step of it moves on 8 ranks
  shardcore verify model.py               build() of model.py, on one device
  shardcore verify model.py:make --json   another function, as JSON
  shardcore checkpoint inspect DIR        what a checkpoint has
  torchrun --nproc_per_node=2 --module shardcore verify model.py:build
                                          on two ranks; rank 0 prints the report
"""

VERIFY = """\
Calls a function of your script and checks every variable of the model that it
returns: its layout, and that every rank stores its shard and nothing else.
"""

PLAN = """\
Calls a function of your script on the meta device, which stores no values, and
prints which layout a policy gives each variable of the model that it returns,
how much a rank stores, and why. It needs no devices and no other processes.
A distribution that the function sets is passed over. With --memory it runs a
train step of the compiled model too, on tensors without values, which take no
memory. With --policy auto it predicts a train step under every mesh of the
devices and every policy, and prints the fastest that fit, with the best plan.
"""

PLAN_EPILOG = """\
examples:
  shardcore plan model.py --mesh 8 --policy fully_sharded
  shardcore plan model.py:make --mesh 2x4 --axes data,model --option small=0
  shardcore plan model.py --mesh 1x8 --python > layout.py    a program to edit
  shardcore plan model.py --mesh 16x8 --memory    the bytes of a train step too
  shardcore plan model.py --devices 64 --policy auto --machine a100 --batch 512
"""

MEASURE = """\
Measures how fast a device multiplies and copies, by dtype, and how fast the
links between ranks are. Writes a description for plan --machine, in less than
a minute.
"""

MEASURE_EPILOG = """\
example:
  torchrun --nproc_per_node=8 --module shardcore measure mine.json
"""

EXPLAIN = """\
Runs one step of the compiled model that a function of your script returns, on
the batch that another one returns. Prints where the layout of each variable
comes from, and which collectives the step starts, with their bytes and reasons.

With --mesh a policy lays the model out, and the function sets no distribution.
Without it the script sets the distribution. Without torchrun this process is
rank 0 of ranks that are simulated: layouts, collectives and bytes are those of
real ranks, values are not.
"""

EXPLAIN_EPILOG = """\
examples:
  shardcore explain model.py --mesh 2x4 --policy fully_sharded --save step.svg
  shardcore explain model.py:make --ranks 8    make() sets the distribution
  torchrun --nproc_per_node=2 --module shardcore explain model.py
                                               real ranks; rank 0 prints
"""

# The default names of the axes, by their number.
AXES = {1: ("data",), 2: ("data", "model"), 3: ("replica", "shard", "model")}
DEFAULT_POLICY = "tensor_parallel"
DEFAULT_BATCH = "batch"

EPILOG = f"""\
The script sets the distribution, and a function returns the built model:

  import keras

  def {DEFAULT_FUNCTION}():
      keras.distribution.set_distribution(keras.distribution.DataParallel())
      return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])

shardcore is installed before the script runs, which is not run as "__main__".

exit code: 0 if all is as it should be, 1 if not, 2 for wrong usage.

{EXAMPLES}"""


class UsageError(ShardcoreError, ValueError):
    """The command line asks for something that cannot be done."""


def parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line, which sets `command` to its first word."""
    loaded = plugins.load()
    strategies, policies = loaded.strategies.entries, loaded.policies.entries
    listed = f"strategies:\n{_entry_lines(strategies)}\n\npolicies:\n{_entry_lines(policies)}"
    raw = argparse.RawDescriptionHelpFormatter
    command_line = argparse.ArgumentParser(
        prog="shardcore",
        formatter_class=raw,
        description="keras.distribution for Keras 3 on PyTorch.",
        epilog=f"{listed}\n\n{EXAMPLES}",
    )
    command_line.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    words = command_line.add_subparsers(required=True, dest="command", metavar="COMMAND")
    add = partial(words.add_parser, formatter_class=raw)
    about = "show the strategy in use, and why not the others, the devices, the versions"
    status = add("status", help=about, description=about)
    about = "show which layout a policy gives each variable of a model"
    plan = add("plan", help=about, description=PLAN, epilog=PLAN_EPILOG)
    about = "show what a step of a model moves, and where each layout comes from"
    explain = add("explain", help=about, description=EXPLAIN, epilog=EXPLAIN_EPILOG)
    about = "check that every rank stores its shards of a model"
    verify = add("verify", help=about, description=VERIFY, epilog=EPILOG)
    about = "measure this machine, for plan --policy auto"
    measure = add("measure", help=about, description=MEASURE, epilog=MEASURE_EPILOG)
    measure.add_argument("file", metavar="FILE", help="the file that is written, such as mine.json")
    about = "inspect, verify and convert sharded checkpoints"
    checkpoint = add(
        "checkpoint", help=about, description=checkpoints.DESCRIPTION, epilog=checkpoints.EPILOG
    )
    checkpoints.add_words(checkpoint)
    for command in (status, plan, explain, verify, measure):
        command.add_argument("--json", action="store_true", help="print data instead of a table")
    for command in (status, explain, verify):
        command.add_argument(
            "--strategy",
            default="auto",
            help=f"how variables are stored: auto (default), {', '.join(strategies)}",
        )
    for command in (plan, explain, verify):
        command.add_argument(
            "target",
            metavar="FILE[:FUNCTION]",
            help=f"a Python script, and its function that returns the model ({DEFAULT_FUNCTION})",
        )
    ranks = explain.add_mutually_exclusive_group()
    ranks.add_argument("--ranks", type=int, metavar="N", help="how many ranks to simulate")
    shape = plan.add_mutually_exclusive_group(required=True)
    shape.add_argument("--devices", type=int, metavar="N", help="how many, for --policy auto")
    for command, ways in ((plan, shape), (explain, ranks)):
        ways.add_argument("--mesh", metavar="2x4", help="how many ranks, by axes")
        command.add_argument(
            "--axes", metavar="NAMES", help=f"the axes' names ({','.join(AXES[2])})"
        )
        command.add_argument(
            "--policy",
            help=f"{', '.join(policies)} (default: {DEFAULT_POLICY})"
            + (", or auto with --devices" if command is plan else ""),
        )
        command.add_argument(
            "--option",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="an option of the policy, such as small=0",
        )
    explain.add_argument("--step", default="train", help="train (default), test or predict")
    for command in (plan, explain):
        command.add_argument(
            "--batch",
            default=DEFAULT_BATCH,
            metavar="FUNCTION",
            help=f"the function of the script that returns the global batch ({DEFAULT_BATCH})"
            + ("; with --policy auto also a number of rows" if command is plan else ""),
        )
    explain.add_argument("--save", metavar="FILE", help="write the picture: step.svg, step.html")
    plan.add_argument(
        "--memory",
        nargs="?",
        const=True,
        metavar="80GB",
        help="print what a train step takes on a rank, by kind; with --policy auto, the limit",
    )
    plan.add_argument("--host", type=int, metavar="8", help="the devices of a host, for auto")
    machine = "the machine, for auto (the one at hand if it is well known, else h100)"
    plan.add_argument("--machine", metavar="NAME|FILE", help=machine)
    plan.add_argument("--python", action="store_true", help="print a program that sets it")
    return command_line


def _entry_lines(entries: Mapping[str, StrategyEntry | PolicyEntry]) -> str:
    below = " " * 22
    return "\n".join(
        line
        for entry in entries.values()
        for line in wrap(f"  {entry.name:<18}  {entry.summary}", 80, subsequent_indent=below)
    )


def parse_target(target: str) -> tuple[Path, str]:
    """Parses `FILE[:FUNCTION]` into an existing file and the name of a function.

    Raises:
        UsageError: If there is no such file, or the function has no name.
    """
    drive, path = os.path.splitdrive(target)
    path, colon, name = path.partition(":")
    file = Path(drive + path)
    if not file.is_file():
        raise UsageError(
            f"there is no file {str(file)!r}: give FILE[:FUNCTION], such as model.py:build"
        )
    if colon and not name.isidentifier():
        raise UsageError(
            f"{name!r} in {target!r} is no function's name: give FILE[:FUNCTION], such as "
            "model.py:build"
        )
    return file, name or DEFAULT_FUNCTION


def parse_mesh(shape: str, names: str | None) -> Mesh:
    """Parses the shape of a mesh, and the names of its axes.

    Raises:
        UsageError: If the shape is not written as 8, 2x4 or 2x2x2.
        MeshError: If there are not as many names.

    Example:
        >>> str(parse_mesh("2x4", None)), str(parse_mesh("8", "batch"))
        ('(data=2, model=4)', '(batch=8)')
        >>> str(parse_mesh("2x4x2", None))
        '(replica=2, shard=4, model=2)'
    """
    sizes = shape.split("x")
    if not all(size.isdecimal() for size in sizes):
        raise UsageError(f"--mesh {shape!r} is no mesh: give ranks by axes, such as 8 or 2x4")
    axes = AXES.get(len(sizes), ()) if names is None else names.split(",")
    return Mesh(map(int, sizes), axes)


def parse_option(text: str) -> tuple[str, Any]:
    """Parses the name and the value of an option: a Python literal, or else text.

    Raises:
        UsageError: If it is not written as NAME=VALUE.

    Example:
        >>> parse_option("small=0"), parse_option("axis=model")
        (('small', 0), ('axis', 'model'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"--option {text!r} is none: give NAME=VALUE, such as small=0")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
