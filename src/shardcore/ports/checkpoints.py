"""Stores of checkpoints and of weights, as the binding needs them. They know bytes, no tensors."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import attrs

from shardcore.domain.checkpoints.grid import Box, HeldPart
from shardcore.domain.checkpoints.index import Index, StoredVariable
from shardcore.domain.checkpoints.weight_keys import FileTensor


@attrs.frozen(eq=False)
class Content:
    """The bytes of a piece, which a rank writes.

    Args:
        key: Its name in the file.
        dtype: The name of its dtype.
        shape: Its shape.
        data: Its bytes in row-major order. They do not change while they are written.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Lease(Protocol):
    """The right to write into a directory of checkpoints, which one process at a time has.

    Attributes:
        directory: The directory.
    """

    directory: Path

    def check(self) -> None:
        """Asks whether this process still has it, before a folder is renamed.

        Raises:
            CheckpointError: If not.
        """

    def use(self) -> "Lease":
        """Counts one more user of the lease; takes a new one if all have released it."""

    def release(self) -> None:
        """Ends one use; after the last one the directory is free."""


@attrs.frozen(eq=False)
class Commit:
    """The end of a save, on one rank: when the files of all ranks are there, it writes the index.

    Args:
        index: The index, without files.
        ranks: How many ranks write a file.
        keep: How many complete checkpoints to keep, the newest ones; None for all.
        lease: The lease of the directory, which the save releases when it has ended.
    """

    index: Index
    ranks: int
    keep: int | None
    lease: Lease


class PendingSave(Protocol):
    """A checkpoint that is being written on another thread, which starts no collective."""

    def wait_for_file(self) -> None:
        """Waits until this rank's file is written. Raises the error of that, if any."""

    def wait_for_commit(self) -> None:
        """Waits until the checkpoint is complete, on the rank that commits; else does nothing.

        Raises:
            CheckpointError: If the file of another rank does not come.
        """

    def cancel(self) -> None:
        """Removes the unfinished folder, on the rank that commits."""


class Reader(Protocol):
    """An open checkpoint."""

    def verify(self) -> None:
        """Compares the checksums of this process's share of the files.

        A file of the share is compared before any piece of it is read, also without this call.

        Raises:
            CheckpointError: If one differs.
        """

    def check(self, variable: StoredVariable, parts: Sequence[HeldPart]) -> None:
        """Compares what files say of a variable with the index.

        Raises:
            CheckpointError: If a file has no such piece, or another one.
        """

    def read(
        self,
        variable: StoredVariable,
        parts: Sequence[HeldPart],
        shape: tuple[int, ...],
        target: memoryview,
    ) -> int:
        """Reads parts of a variable into an array.

        Args:
            variable: The variable.
            parts: The parts of it that are wanted.
            shape: The shape of the array.
            target: The bytes of the array, in row-major order.

        Returns:
            The bytes that were read.
        """


class CheckpointStore(Protocol):
    """A place for checkpoints: a directory with a folder for each."""

    def lease(self, directory: Path) -> Lease:
        """Takes the lease of a directory, which is made if it is missing.

        Raises:
            CheckpointError: If another process has it.
        """

    def begin(self, lease: Lease, step: int) -> Path:
        """Makes a new folder for the files of all ranks. One rank calls it, the others wait."""

    def write(
        self, folder: Path, rank: int, contents: Sequence[Content], commit: Commit | None
    ) -> PendingSave:
        """Begins to write this rank's file into a folder of `begin`.

        Args:
            folder: The folder.
            rank: The number of the file.
            contents: The pieces that this rank writes.
            commit: What to do when all files are written; None on all ranks but one.
        """

    def path(self, directory: Path, step: int) -> Path:
        """The folder of the checkpoint of `step` when it is complete."""

    def latest(self, directory: Path) -> Path | None:
        """Finds the newest complete checkpoint; logs each newer one that is not complete."""

    def find(self, path: Path) -> Path | None:
        """Takes `path` if it is a folder with an index, else the newest complete one in it."""

    def index(self, checkpoint: Path) -> Index:
        """Reads the index of a complete checkpoint.

        Raises:
            CheckpointError: If it is not complete, or its index is damaged.
        """

    def reading(
        self, checkpoint: Path, index: Index, position: int = 0, readers: int = 1
    ) -> AbstractContextManager[Reader]:
        """Opens a checkpoint for reading.

        Args:
            checkpoint: Its folder.
            index: Its index.
            position: The number of this process among those that read it together.
            readers: How many they are. Each compares the checksums of its share of the files.
        """


@attrs.frozen(eq=False)
class PartToWrite:
    """A part of a tensor that a rank writes into files of weights.

    Args:
        tensor: The tensor.
        box: The part of it.
        values: Copies its bytes to the host, in row-major order.
    """

    tensor: FileTensor
    box: Box
    values: Callable[[], memoryview]


@attrs.frozen
class WeightTarget:
    """Files of weights that are to be written.

    Args:
        path: The folder or the file.
        tensors: The tensors, in order.
        limit: The most bytes of a file that has several tensors.
    """

    path: Path
    tensors: tuple[FileTensor, ...]
    limit: int


class WeightReader(Protocol):
    """Open files of weights."""

    @property
    def tensors(self) -> Mapping[str, FileTensor]:
        """The tensors in them, by key."""

    def problem(self, tensor: FileTensor) -> str:
        """Says what of a tensor is missing in the files; empty if nothing is."""

    def units(self, tensor: FileTensor, box: Box) -> Sequence[Box]:
        """Lists the parts that `read` takes to get `box`: they contain it, and none overlap.

        Those of two boxes that do not overlap are equal, or do not overlap either.
        """

    def read(self, tensor: FileTensor, box: Box) -> tuple[memoryview, int]:
        """Reads a part of a tensor, one of `units`.

        Returns:
            Its bytes in row-major order, and how many were read from files for it.
        """


class WeightSource(Protocol):
    """A format of files of weights, which other programs write."""

    def find(self, path: Path) -> Path:
        """Chooses what to read at `path`, where there may be several. One rank calls it."""

    def reading(self, path: Path) -> AbstractContextManager[WeightReader]:
        """Opens files for reading, on one rank or on several.

        Raises:
            CheckpointError: If there are none, or they are damaged.
        """


class WeightStore(WeightSource, Protocol):
    """A format of files of weights, which other programs read and write."""

    def check(self, target: WeightTarget) -> None:
        """Refuses files that must not be mixed with these, and changes nothing. One rank calls it.

        Raises:
            CheckpointError: If there are such files.
        """

    def begin(self, target: WeightTarget) -> None:
        """Makes room for the files, after `check`. One rank calls it, the others wait."""

    def write(self, target: WeightTarget, parts: Sequence[PartToWrite]) -> None:
        """Writes the parts of this rank. All ranks call it together."""

    def complete(self, target: WeightTarget) -> None:
        """Gives the files their names. One rank calls it when all have written."""

    def discard(self, target: WeightTarget) -> None:
        """Removes what an unfinished write has left. One rank calls it."""
