"""The folders of checkpoints in a directory: complete ones, and those that are being written.

A complete checkpoint is a folder `step-00000012` that has an index. While it is written its name
begins with a dot. The folder is renamed when all its files are on the disk.
"""

import logging
import os
import re
import shutil
from pathlib import Path

from shardcore.domain.checkpoints.index import Index, index_from
from shardcore.domain.errors import CheckpointError

logger = logging.getLogger("shardcore.checkpoints")

INDEX = "index.json"
UNFINISHED = ".unfinished-"
_NAME = re.compile(r"step-(\d{8,18})")
_INDEX_LIMIT = 2**30  # bytes


def path(directory: Path, step: int) -> Path:
    """Returns the folder of a complete checkpoint."""
    return directory / f"step-{step:08d}"


def begin(directory: Path, step: int) -> Path:
    """Returns a new folder to write into; removes unfinished folders of a crash."""
    directory.mkdir(parents=True, exist_ok=True)
    for left in _unfinished(directory):
        logger.warning("%s was not completed: it is removed", left)
        shutil.rmtree(left)
    folder = directory / f"{UNFINISHED}{path(directory, step).name}"
    folder.mkdir()
    return folder


def complete(folder: Path) -> Path:
    """Renames a folder whose files are on the disk to its name as a complete checkpoint."""
    target = folder.with_name(folder.name.removeprefix(UNFINISHED))
    sync(folder)
    if target.exists():
        remove(target)
    os.rename(folder, target)
    sync(target.parent)
    return target


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint, which is incomplete from the first moment on."""
    hidden = checkpoint.with_name(f"{UNFINISHED}removed-{checkpoint.name}")
    os.rename(checkpoint, hidden)
    shutil.rmtree(hidden)


def all_of(directory: Path) -> list[Path]:
    """Returns all checkpoints of a directory, damaged ones too, the newest first."""
    found = [each for each in directory.glob("step-*") if _NAME.fullmatch(each.name)]
    return sorted(found, key=lambda each: int(each.name.removeprefix("step-")), reverse=True)


def latest(directory: Path) -> Path | None:
    """Returns the newest complete checkpoint, None without one."""
    for left in _unfinished(directory):
        logger.warning("%s was not completed: it is skipped", left)
    for each in all_of(directory):
        try:
            read_index(each)
        except CheckpointError as error:
            logger.warning("%s is skipped: %s", each, error)
        else:
            return each
    return None


def find(path: Path) -> Path | None:
    """Returns `path` if it is a folder with an index, else the newest complete one in it."""
    return path if (path / INDEX).exists() else latest(path)


def keep_newest(directory: Path, count: int) -> None:
    """Removes all complete checkpoints but the newest `count`; others it does not touch."""
    kept = 0
    for each in all_of(directory):
        try:
            read_index(each)
        except CheckpointError:
            continue
        kept += 1
        if kept > count:
            remove(each)


def _unfinished(directory: Path) -> list[Path]:
    """Returns the folders of checkpoints that are not complete, or only partly removed."""
    return sorted(each for each in directory.glob(f"{UNFINISHED}*step-*") if each.is_dir())


def write_index(folder: Path, index: Index) -> None:
    """Writes the index, down to the disk."""
    with (folder / INDEX).open("x") as file:
        file.write(index.to_text())
        file.flush()
        os.fsync(file.fileno())


def read_index(checkpoint: Path) -> Index:
    """Returns the index of a checkpoint whose files are there, in their sizes.

    Raises:
        CheckpointError: If a file is missing or cut, or the index is damaged.
    """
    try:
        if (checkpoint / INDEX).stat().st_size > _INDEX_LIMIT:
            raise CheckpointError(f"Its index has more than {_INDEX_LIMIT} bytes.")
        index = index_from((checkpoint / INDEX).read_text())
        for file in index.files:
            size = (checkpoint / file.name).stat().st_size
            if size != file.size:
                raise CheckpointError(f"File {file.name!r} has {size} bytes, not {file.size}.")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(checkpoint)!r} is no complete checkpoint: {error} Choose another one; "
            "shardcore.latest_checkpoint(directory) finds the newest complete one."
        ) from None
    return index


def sync(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
