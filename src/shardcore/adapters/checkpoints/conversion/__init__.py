"""Conversion between checkpoints and files of Keras or of safetensors, one variable at a time."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from shardcore.adapters.checkpoints import folders
from shardcore.adapters.checkpoints.conversion import reading, writing
from shardcore.adapters.checkpoints.lease import acquire
from shardcore.domain.errors import CheckpointError


@attrs.frozen
class Converted:
    """The report on a conversion.

    Args:
        path: What was written.
        variables: How many variables it has.
        nbytes: The bytes of their values.
        left_out: The variables of the source that files of this format do not have.
    """

    path: str
    variables: int
    nbytes: int
    left_out: tuple[str, ...]


def convert(source: Path, target: Path, max_shard_bytes: int | None = None) -> Converted:
    """Converts a checkpoint or weights to another format. The ending of `target` says which.

    Args:
        source: The folder of a checkpoint, a folder of safetensors files, or a file that ends in
            .safetensors, .weights.h5 or .weights.json.
        target: Such a file or folder. A folder `step-00000012` becomes a checkpoint.
        max_shard_bytes: The size of the files in a folder of safetensors and of .weights.json.

    Raises:
        CheckpointError: If the source is none of these, the target exists, or a variable cannot
            be written in its format.
    """
    if target.exists():
        raise CheckpointError(
            f"{str(target)!r} exists: remove it, or give another target.", name=str(target)
        )
    write = writing.writer_of(target)
    with reading.open_source(source) as content, _lease_for(target):
        storable, left_out = writing.divide_storable(content, target)
        unfinished = target.with_name(f"{folders.UNFINISHED}{target.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            write(unfinished, target, attrs.evolve(content, variables=storable), max_shard_bytes)
            _move(unfinished, target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    nbytes = sum(variable.nbytes for variable in storable)
    return Converted(
        str(target), len(storable), nbytes, tuple(variable.name for variable in left_out)
    )


@contextmanager
def _lease_for(target: Path) -> Iterator[None]:
    """Opens a context in which no job writes checkpoints beside a target that is one."""
    if not writing.is_checkpoint(target):
        yield
        return
    lease = acquire(target.parent)
    try:
        yield
    finally:
        lease.release()


def _move(unfinished: Path, target: Path) -> None:
    """Renames the written files to `target`; of several files, the one that it names comes last."""
    if writing.is_folder(target):
        folders.sync(unfinished)
        os.rename(unfinished, target)
    else:
        for file in sorted(unfinished.iterdir(), key=lambda file: file.name == target.name):
            os.rename(file, target.with_name(file.name))
    folders.sync(target.parent)
