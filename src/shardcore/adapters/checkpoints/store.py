"""The port `CheckpointStore` by folders of safetensors files, which a thread of each rank writes.

Ranks share nothing but the folder: each says by a small report beside its file that it is done.
One rank waits for all reports, writes the index, and renames the folder.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import attrs

from shardcore.adapters.checkpoints import folders, safetensors
from shardcore.adapters.checkpoints.lease import acquire
from shardcore.adapters.checkpoints.safetensors import SafetensorsFile
from shardcore.adapters.ranks.job import process_group
from shardcore.domain.checkpoints.file_format import Entry, header_of
from shardcore.domain.checkpoints.grid import Box, HeldPart
from shardcore.domain.checkpoints.index import Index, StoredFile, StoredVariable
from shardcore.domain.errors import CheckpointError
from shardcore.ports.checkpoints import Commit, Content, Reader
from shardcore.reporting.logs import log_of

logger = log_of("checkpoints")

_POLL_SECONDS = 0.02
_REPORT_BYTES = 2**16


@attrs.define(eq=False)
class _Work:
    """A function on a thread, whose error is raised where it is waited for."""

    run: Callable[[], None]
    error: Exception | None = attrs.field(default=None, init=False)
    done: threading.Event = attrs.field(factory=threading.Event, init=False)

    def __call__(self) -> None:
        try:
            self.run()
        except Exception as error:  # noqa: BLE001 - raised on the thread that waits
            self.error = error
            logger.error("a checkpoint could not be written: %s", error)
        finally:
            self.done.set()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


@attrs.frozen(eq=False)
class FileSave:
    """A checkpoint that a thread of this process is writing.

    Args:
        folder: The folder, which the rank that commits renames.
        rank: The number of this rank's file.
        contents: The pieces that this rank writes.
        commit: What to do when all files are written; None on all ranks but one.
    """

    folder: Path
    rank: int
    contents: list[Content]
    commit: Commit | None
    _file: _Work = attrs.field(init=False)
    _commit: _Work = attrs.field(init=False)
    _cancelled: threading.Event = attrs.field(factory=threading.Event, init=False)

    @_file.default
    def _work_of_file(self) -> _Work:
        return _Work(self._write)

    @_commit.default
    def _work_of_commit(self) -> _Work:
        return _Work(self._complete)

    def start(self) -> "FileSave":
        """Starts the thread. It ends with the process, which leaves the folder unfinished."""
        threading.Thread(target=self._run, name="shardcore-checkpoint", daemon=True).start()
        return self

    def wait_for_file(self) -> None:
        """Waits until this rank's file is on the disk."""
        self._file.wait()

    def wait_for_commit(self) -> None:
        """Waits until the checkpoint is complete, if this rank commits it."""
        if self.commit is not None:
            self._commit.wait()

    def cancel(self) -> None:
        """Stops to wait for other ranks, and removes the folder, on the rank that commits.

        If another job has the directory meanwhile, that one removes it.
        """
        self._cancelled.set()
        if self.commit is None:
            return
        self._commit.done.wait()
        with suppress(CheckpointError):
            lease = self.commit.lease.use()
            try:
                folders.discard(lease, self.folder)
            finally:
                lease.release()

    def _run(self) -> None:
        try:
            self._file()
            self.contents.clear()  # the memory of the copies
            if self._file.error is not None:
                self._cancelled.set()
        finally:
            self._commit()

    def _write(self) -> None:
        name = f"rank-{self.rank:05d}"
        header = header_of((c.key, c.dtype, c.shape) for c in self.contents)
        path = self.folder / f"{name}.safetensors"
        file = safetensors.write(path, header, (c.data for c in self.contents))
        report = self.folder / f"{name}.json"
        unfinished = report.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(attrs.asdict(file)))
        os.rename(unfinished, report)

    def _complete(self) -> None:
        if self.commit is None:
            return
        try:
            self._commit_files(self.commit)
        finally:
            self.commit.lease.release()

    def _commit_files(self, commit: Commit) -> None:
        files = tuple(self._report(rank) for rank in range(commit.ranks))
        folders.write_index(self.folder, attrs.evolve(commit.index, files=files))
        for report in self.folder.glob("rank-*.json"):
            report.unlink()
        target = folders.complete(commit.lease, self.folder)
        if commit.keep is not None:
            folders.keep_newest(commit.lease, commit.keep)
        logger.info("%s is complete", target)

    def _report(self, rank: int) -> StoredFile:
        """Waits until the file of `rank` is written."""
        report = self.folder / f"rank-{rank:05d}.json"
        deadline = time.monotonic() + process_group.seconds(None)
        while not report.exists():
            if self._cancelled.is_set() or time.monotonic() > deadline:
                raise CheckpointError(
                    f"The file of rank {rank} did not come into {str(self.folder)!r}: the "
                    "checkpoint is given up. All hosts have to share the folder's file system.",
                    name=str(self.folder),
                )
            time.sleep(_POLL_SECONDS)
        return StoredFile(**json.loads(folders.read(report, _REPORT_BYTES)))


def write(folder: Path, rank: int, contents: Sequence[Content], commit: Commit | None) -> FileSave:
    """Begins to write this rank's file into `folder`."""
    return FileSave(folder, rank, list(contents), commit).start()


@attrs.frozen
class FolderStore:
    """Checkpoints in folders, each with one file for each rank that saved it."""

    lease = staticmethod(acquire)
    begin = staticmethod(folders.begin)
    path = staticmethod(folders.path)
    latest = staticmethod(folders.latest)
    find = staticmethod(folders.find)
    index = staticmethod(folders.read_index)
    write = staticmethod(write)

    @contextmanager
    def reading(
        self, checkpoint: Path, index: Index, position: int = 0, readers: int = 1
    ) -> Iterator[Reader]:
        """Opens the files of a checkpoint, each when it is needed first."""
        with ExitStack() as stack:
            yield FolderReader(checkpoint, index, stack, position, readers)


@attrs.frozen
class FolderReader:
    """An open checkpoint. `stack` closes its files; `_file` alone opens them."""

    checkpoint: Path
    index: Index
    stack: ExitStack
    position: int
    readers: int
    _files: dict[int, SafetensorsFile] = attrs.field(factory=dict, init=False)

    def verify(self) -> None:
        """Compares the checksums of this process's share of the files."""
        for number in range(self.position, len(self.index.files), self.readers):
            self._file(number)

    def check(self, variable: StoredVariable, parts: Sequence[HeldPart]) -> None:
        """Compares the headers of the files with the index."""
        for _ in self._copies(variable, parts):
            pass

    def read(
        self,
        variable: StoredVariable,
        parts: Sequence[HeldPart],
        shape: tuple[int, ...],
        target: memoryview,
    ) -> int:
        """Reads parts of a variable, and returns the bytes that were read."""
        return sum(
            file.read(entry, part, target, shape, target_box)
            for file, entry, part, target_box in self._copies(variable, parts)
        )

    def _copies(
        self, variable: StoredVariable, parts: Sequence[HeldPart]
    ) -> Iterator[tuple[SafetensorsFile, Entry, Box, Box]]:
        """Yields the pieces that have elements of `parts`: which of them, and where they go."""
        for part in parts:
            for number, common in variable.grid.overlaps(part.full):
                file, box = self._file(variable.files[number]), variable.grid.box(number)
                entry = file.entry(variable.key(box), variable.dtype, box.shape)
                yield file, entry, common.within(box), part.local_box(common)

    def _file(self, number: int) -> SafetensorsFile:
        """Opens a file once; compares its checksum if that is this process's share."""
        if number not in self._files:
            stored = self.index.files[number]
            path = folders.current_path(self.checkpoint) / stored.name
            checksum = stored.sha256 if number % self.readers == self.position else None
            self._files[number] = self.stack.enter_context(safetensors.open_file(path, checksum))
        return self._files[number]
