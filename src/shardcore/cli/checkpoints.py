"""The command `shardcore checkpoint`: inspects, verifies and converts, without a model."""

import argparse
import json
from pathlib import Path

from shardcore.domain.checkpoints.index import Index
from shardcore.domain.errors import CheckpointError
from shardcore.reporting.checkpoint import MOST_ROWS, Inspection

DESCRIPTION = """\
Works on checkpoints of save_checkpoint() and ShardedCheckpoint, in one process,
without a model. Of a directory with several it takes the newest one.
"""

CONVERT = """\
Reads one variable at a time, and writes it. The name of the target says what it
becomes:
  weights.weights.h5     weights for model.load_weights()
  weights.weights.json   the same in several files, as max_shard_size does
  model.safetensors      one file
  folder                 safetensors files and their index
  step-00000012          a checkpoint for shardcore.load_checkpoint()
"""

EPILOG = """\
examples:
  shardcore checkpoint inspect checkpoints
  shardcore checkpoint verify checkpoints/step-00000012
  shardcore checkpoint convert checkpoints weights.weights.h5
  shardcore checkpoint convert weights.weights.h5 start/step-00000000
"""


def add_words(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands to the parser of `shardcore checkpoint`."""
    raw = argparse.RawDescriptionHelpFormatter
    words = parser.add_subparsers(required=True, dest="action", metavar="ACTION")
    about = "show variables, shapes, layouts, sizes, step and versions"
    inspect = words.add_parser("inspect", help=about, description=about)
    inspect.add_argument("--json", action="store_true", help="print data instead of a table")
    about = "compare the checksums and the headers of all files"
    verify = words.add_parser("verify", help=about, description=about)
    for command in (inspect, verify):
        command.add_argument("directory", type=Path, help="a checkpoint, or a directory of several")
    about = "convert to or from weights of Keras or safetensors files"
    convert = words.add_parser("convert", help=about, description=CONVERT, formatter_class=raw)
    convert.add_argument("source", type=Path, help="a checkpoint, or a file or folder as below")
    convert.add_argument("target", type=Path, help="what to write; it must not exist")
    convert.add_argument(
        "--max-shard-size",
        type=float,
        metavar="GB",
        help="the size of each of several files (default: 5)",
    )


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Runs the subcommand, and returns its exit code and what it prints."""
    return {"inspect": _inspect, "verify": _verify, "convert": _convert}[options.action](options)


def _inspect(options: argparse.Namespace) -> tuple[int, str]:
    path, index = _open_checkpoint(options.directory)
    shown = Inspection(str(path), index)
    if not options.json:
        return 0, f"{shown}\n"
    indent = 2 if len(index.variables) <= MOST_ROWS else None  # which is ten times slower
    return 0, f"{json.dumps(shown.to_dict(), indent=indent)}\n"


def _verify(options: argparse.Namespace) -> tuple[int, str]:
    from shardcore.adapters.checkpoints.store import FolderStore

    path, index = _open_checkpoint(options.directory)
    with FolderStore().reading(path, index) as reader:
        reader.verify()
        for variable in index.variables:
            reader.check(variable, variable.as_one_part)
    counts = f"{len(index.variables)} variables in {len(index.files)} files"
    return 0, f"{path}: {counts}, all as written\n"


def _convert(options: argparse.Namespace) -> tuple[int, str]:
    from shardcore.adapters.checkpoints import folders
    from shardcore.adapters.checkpoints.conversion import convert

    source: Path = options.source
    if source.is_dir() or not source.exists():
        source = folders.find(source) or source
    limit = options.max_shard_size
    if limit is not None and limit <= 0:
        raise CheckpointError(f"Expected --max-shard-size above 0, got {limit}.", got=str(limit))
    done = convert(source, options.target, None if limit is None else int(limit * 2**30))
    text = f"{done.path}: {done.variables} variables, {done.nbytes} bytes, from {source}\n"
    if done.left_out:
        text += f"left out, as this format does not have them: {', '.join(done.left_out)}\n"
    return 0, text


def _open_checkpoint(directory: Path) -> tuple[Path, Index]:
    from shardcore.adapters.checkpoints import folders

    opened = folders.open_newest(directory)
    if opened is None:
        raise CheckpointError(
            f"Expected a complete checkpoint or a folder of such, got {str(directory)!r}: give the "
            "directory that shardcore.save_checkpoint() was given.",
            got=repr(str(directory)),
        )
    return opened
