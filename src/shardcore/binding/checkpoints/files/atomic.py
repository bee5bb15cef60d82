"""Writing of files so that a reader, or a crash, finds the old file or the new one, complete."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from shardcore.domain.errors import name_file


def write_file(path: str, write: Callable[[str], object]) -> None:
    """Writes a file into a new folder beside `path`, and renames it when it is on disk.

    The folder of a writer that was killed is removed first. Errors name `path`.

    Args:
        path: The file. A link to a file stays a link.
        write: Called with the path of the unfinished file, whose name is that of the file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/a.txt"
        ...     write_file(path, lambda unfinished: Path(unfinished).write_text("complete"))
        ...     Path(path).read_text(), os.listdir(folder)
        ('complete', ['a.txt'])
    """
    target = Path(os.path.realpath(path))
    folder = target.with_name(f".unfinished-{target.name}")
    unfinished = folder / target.name  # the ending stays: it selects the format
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write(str(unfinished))
        _flush(unfinished)
        os.replace(unfinished, target)
        _flush(target.parent)
    except Exception as error:
        _rename_in(error, path, (str(unfinished), str(folder)))
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def atomically_written(path: str) -> Iterator[TextIO]:
    """Opens a text file that gets its name when it is closed and complete.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with atomically_written(f"{folder}/a.json") as file:
        ...         _ = file.write("{}")
        ...     os.listdir(folder)
        ['a.json']
    """
    parts: list[str] = []

    class _Text:
        write = staticmethod(parts.append)

    yield _Text()  # type: ignore[misc]
    write_file(path, lambda unfinished: Path(unfinished).write_text("".join(parts)))


def _flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_in(error: Exception, path: str, others: tuple[str, ...]) -> None:
    """Replaces the `others` in the message of `error` by `path`."""

    def renamed(value: object) -> object:
        for other in others:
            value = value.replace(other, path) if isinstance(value, str) else value
        return value

    error.args = tuple(map(renamed, error.args))
    if isinstance(error, OSError):
        name_file(error, path)
        # None would be shown, as if it were the name.
        if error.filename is not None:
            error.filename = renamed(error.filename)
        if error.filename2 is not None:
            del error.filename2
