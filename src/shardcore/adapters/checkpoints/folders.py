"""The folders of checkpoints in a directory: how they are found, written, completed, removed.

A complete checkpoint is a folder `step-00000012` that has an index. While it is written its name
begins with a dot. The folder is renamed when all its files are on the disk. One of the same step
that was complete before is `.replaced-step-00000012` until then: after a crash between the two
renames it still is the checkpoint of this step. So at every moment a complete checkpoint of each
step that had one exists, under one of its two names (ADR 53). Nothing is asked of the file system
but to rename folders. One job at a time changes a directory: the one that has its lease.
"""

import os
import re
import shutil
import stat
from pathlib import Path

from shardcore.domain.checkpoints import file_format
from shardcore.domain.checkpoints.index import Index, index_from
from shardcore.domain.errors import CheckpointError
from shardcore.ports.checkpoints import Lease
from shardcore.reporting.logs import log_of

logger = log_of("checkpoints")

INDEX = "index.json"
UNFINISHED = ".unfinished-"
REPLACED = ".replaced-"
_NAME = re.compile(rf"({re.escape(REPLACED)})?step-(\d{{8,18}})")


def path(directory: Path, step: int) -> Path:
    """Names the folder of a complete checkpoint."""
    return directory / f"step-{step:08d}"


def _second_name(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{REPLACED}{checkpoint.name.removeprefix(REPLACED)}")


def _first_name(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name.removeprefix(REPLACED))


def current_path(checkpoint: Path) -> Path:
    """Finds the path of a checkpoint now, under one of its two names.

    The first name is tried again at the end: a rename may have come between the two tries.
    """
    first, second = _first_name(checkpoint), _second_name(checkpoint)
    return next((name for name in (first, second, first) if os.path.lexists(name)), checkpoint)


def _all_of(directory: Path) -> list[Path]:
    """Lists all checkpoints of a directory, damaged ones too, the newest first.

    Of two of one step that which is being replaced comes last.
    """
    if not directory.is_dir():
        return []
    matches = [match for name in os.listdir(directory) if (match := _NAME.fullmatch(name))]
    matches.sort(key=lambda match: (-int(match[2]), match[1] or ""))
    return [directory / match[0] for match in matches]


def latest(directory: Path) -> Path | None:
    """Finds the newest complete checkpoint; None without one."""
    pair = newest(directory)
    return None if pair is None else pair[0]


def newest(directory: Path) -> tuple[Path, Index] | None:
    """Finds the newest complete checkpoint, and reads its index; None without one."""
    for left in unfinished(directory):
        logger.warning("%s was not completed: it is skipped", left)
    for checkpoint in _all_of(directory):
        try:
            return checkpoint, read_index(checkpoint)
        except CheckpointError as error:
            renamed = current_path(checkpoint)  # meanwhile, by the job that writes
            if renamed != checkpoint and is_complete(renamed):
                return renamed, read_index(renamed)
            logger.warning("%s is skipped: %s", checkpoint, error)
    return None


def find(path: Path) -> Path | None:
    """Chooses `path` if it is a folder with an index, else the newest complete one in it."""
    checkpoint = _current_name(path)
    return checkpoint if (checkpoint / INDEX).exists() else latest(path)


def open_newest(path: Path) -> tuple[Path, Index] | None:
    """Finds the checkpoint that `find` chooses, and reads its index."""
    checkpoint = _current_name(path)
    if (checkpoint / INDEX).exists():
        return checkpoint, read_index(checkpoint)
    return newest(path)


def _current_name(path: Path) -> Path:
    return current_path(path) if _NAME.fullmatch(path.name) else path


def unfinished(directory: Path) -> list[Path]:
    """Lists the folders of checkpoints that are not complete, or only partly removed."""
    return sorted(directory.glob(f"{UNFINISHED}*step-*"))


def is_complete(checkpoint: Path) -> bool:
    """Tells whether a checkpoint has its index, and files in their sizes."""
    try:
        read_index(checkpoint)
    except CheckpointError:
        return False
    return True


def read_index(checkpoint: Path) -> Index:
    """Reads the index of a checkpoint whose files are there, in their sizes.

    Raises:
        CheckpointError: If a file is missing or cut, or the index is damaged.
    """
    try:
        index = index_from(read(checkpoint / INDEX, file_format.INDEX_BYTES))
        for file in index.files:
            size = check(checkpoint / file.name).st_size
            if size != file.size:
                raise CheckpointError(
                    f"File {file.name!r} has {size} bytes, not {file.size}.", name=file.name
                )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(checkpoint)!r} is no complete checkpoint: {error} Choose another one; "
            "shardcore.latest_checkpoint(directory) finds the newest complete one.",
            name=str(checkpoint),
        ) from None
    return index


def begin(lease: Lease, step: int) -> Path:
    """Makes a new folder to write into; removes, or undoes, what a crash has left."""
    for left in unfinished(lease.directory):
        logger.warning("%s was not completed: it is removed", left)
        lease.check()
        _delete(left)
    for checkpoint in _all_of(lease.directory):
        if checkpoint != _first_name(checkpoint):
            _end_replacement(lease, checkpoint)
    folder = lease.directory / f"{UNFINISHED}{path(lease.directory, step).name}"
    folder.mkdir()
    return folder


def complete(lease: Lease, folder: Path) -> Path:
    """Renames a folder whose files are on the disk to its name as a complete checkpoint.

    Another checkpoint of this step has its second name until then, and is removed.
    """
    target = folder.with_name(folder.name.removeprefix(UNFINISHED))
    replaced = _second_name(target)
    sync(folder)
    lease.check()
    if os.path.lexists(target):
        os.rename(target, replaced)
        sync(target.parent)
    try:
        lease.check()
        os.rename(folder, target)
    except BaseException:
        if os.path.lexists(replaced) and not os.path.lexists(target):
            os.rename(replaced, target)
        raise
    sync(target.parent)
    if os.path.lexists(replaced):
        remove(lease, replaced)
    return target


def remove(lease: Lease, checkpoint: Path) -> None:
    """Removes a checkpoint, which is incomplete from the first moment on; of a link, the link."""
    lease.check()
    hidden = checkpoint.with_name(f"{UNFINISHED}removed-{_first_name(checkpoint).name}")
    _delete(hidden)
    os.rename(checkpoint, hidden)
    _delete(hidden)


def keep_newest(lease: Lease, count: int) -> None:
    """Removes all complete checkpoints but the newest `count`; others it does not touch."""
    complete = [folder for folder in _all_of(lease.directory) if is_complete(folder)]
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
    checkpoint = _first_name(replaced)
    if is_complete(checkpoint):
        remove(lease, replaced)
        return
    logger.warning("%s was to be replaced, and was not: it gets its name again", checkpoint)
    if os.path.lexists(checkpoint):
        remove(lease, checkpoint)
    lease.check()
    os.rename(replaced, checkpoint)
    sync(lease.directory)


def _delete(path: Path) -> None:
    """Deletes a folder with its content; of a link, the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_descriptor(path: Path) -> int:
    """Opens a regular file for reading, by its descriptor. A link to one is followed.

    Raises:
        CheckpointError: If it is something else.
        OSError: If it cannot be opened.
    """
    check(path)
    # It may have become a pipe since the check: the opening does not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refusal(path)
    return descriptor


def check(path: Path) -> os.stat_result:
    """Reads the status of a regular file.

    Raises:
        CheckpointError: If it is something else.
        OSError: If there is none.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(path)
    return status


def read(path: Path, most: int) -> bytes:
    """Reads a regular file of at most `most` bytes.

    Raises:
        CheckpointError: If it is something else, or has more bytes.
        OSError: If it cannot be read.
    """
    with os.fdopen(open_descriptor(path), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise CheckpointError(f"File {str(path)!r} has more than {most} bytes.", name=str(path))
    return content


def _refusal(path: Path) -> CheckpointError:
    return CheckpointError(
        f"Expected a regular file, but {str(path)!r} is none: pipes, devices and folders are not "
        "read."
    )
