"""Changes of a directory of checkpoints: one is begun, completed or removed, in a lease (ADR 53).

At every moment a complete checkpoint of each step that had one exists, under one of its two names.
Folders are renamed, and nothing else is asked of the file system.
"""

import os
import shutil
from pathlib import Path

from shardcore.adapters.checkpoints import folders
from shardcore.adapters.checkpoints.folders import INDEX, UNFINISHED
from shardcore.domain.checkpoints.index import Index
from shardcore.ports.checkpoints import Lease
from shardcore.reporting.logs import log_of

logger = log_of("checkpoints")


def begin(lease: Lease, step: int) -> Path:
    """Returns a new folder to write into; removes, or undoes, what a crash has left."""
    for left in folders.unfinished(lease.directory):
        logger.warning("%s was not completed: it is removed", left)
        lease.check()
        _delete(left)
    for checkpoint in folders.all_of(lease.directory):
        if checkpoint != folders.first_name(checkpoint):
            _end_replacement(lease, checkpoint)
    folder = lease.directory / f"{UNFINISHED}{folders.path(lease.directory, step).name}"
    folder.mkdir()
    return folder


def complete(lease: Lease, folder: Path) -> Path:
    """Renames a folder whose files are on the disk to its name as a complete checkpoint.

    Another checkpoint of this step has its second name until then, and is removed.
    """
    target = folder.with_name(folder.name.removeprefix(UNFINISHED))
    replaced = folders.second_name(target)
    folders.sync(folder)
    lease.check()
    if os.path.lexists(target):
        os.rename(target, replaced)
        folders.sync(target.parent)
    try:
        lease.check()
        os.rename(folder, target)
    except BaseException:
        if os.path.lexists(replaced) and not os.path.lexists(target):
            os.rename(replaced, target)
        raise
    folders.sync(target.parent)
    if os.path.lexists(replaced):
        remove(lease, replaced)
    return target


def remove(lease: Lease, checkpoint: Path) -> None:
    """Removes a checkpoint, which is incomplete from the first moment on; of a link, the link."""
    lease.check()
    hidden = checkpoint.with_name(f"{UNFINISHED}removed-{folders.first_name(checkpoint).name}")
    _delete(hidden)
    os.rename(checkpoint, hidden)
    _delete(hidden)


def keep_newest(lease: Lease, count: int) -> None:
    """Removes all complete checkpoints but the newest `count`; others it does not touch."""
    complete = [folder for folder in folders.all_of(lease.directory) if folders.is_complete(folder)]
    for checkpoint in complete[count:]:
        remove(lease, checkpoint)


def discard(lease: Lease, folder: Path) -> None:
    """Removes a folder of `begin` that will not be completed."""
    lease.check()
    _delete(folder)


def write_index(folder: Path, index: Index) -> None:
    """Writes the index, down to the disk."""
    with (folder / INDEX).open("x") as file:
        file.write(index.to_text())
        file.flush()
        os.fsync(file.fileno())


def _end_replacement(lease: Lease, replaced: Path) -> None:
    """Ends what a crash has left of a replacement: the new one counts if it is complete."""
    checkpoint = folders.first_name(replaced)
    if folders.is_complete(checkpoint):
        remove(lease, replaced)
        return
    logger.warning("%s was to be replaced, and was not: it gets its name again", checkpoint)
    if os.path.lexists(checkpoint):
        remove(lease, checkpoint)
    lease.check()
    os.rename(replaced, checkpoint)
    folders.sync(lease.directory)


def _delete(path: Path) -> None:
    """Deletes a folder with its content; of a link, the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
