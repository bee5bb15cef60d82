"""The port `CheckpointStore` by folders of safetensors files."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

from shardcore.adapters.checkpoints import changes, folders, safetensors, writing
from shardcore.adapters.checkpoints.lease import acquire
from shardcore.adapters.checkpoints.safetensors import SafetensorsFile
from shardcore.domain.checkpoints.grid import Box, HeldPart
from shardcore.domain.checkpoints.header import Entry
from shardcore.domain.checkpoints.index import Index, StoredVariable
from shardcore.ports.checkpoints import Reader


@attrs.frozen
class FolderStore:
    """Checkpoints in folders, each with one file for each rank that saved it."""

    lease = staticmethod(acquire)
    begin = staticmethod(changes.begin)
    path = staticmethod(folders.path)
    latest = staticmethod(folders.latest)
    find = staticmethod(folders.find)
    index = staticmethod(folders.read_index)
    write = staticmethod(writing.write)

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
        """Returns a file of pieces, with its checksum compared if that is this process's share."""
        if number not in self._files:
            stored = self.index.files[number]
            path = folders.current_path(self.checkpoint) / stored.name
            checksum = stored.sha256 if number % self.readers == self.position else None
            self._files[number] = self.stack.enter_context(safetensors.open_file(path, checksum))
        return self._files[number]
