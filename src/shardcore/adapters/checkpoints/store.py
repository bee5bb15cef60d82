"""The port `CheckpointStore` by folders of safetensors files."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

from shardcore.adapters.checkpoints import folders, safetensors, writing
from shardcore.adapters.checkpoints.safetensors import SafetensorsFile
from shardcore.domain.checkpoints.grid import Box, Held
from shardcore.domain.checkpoints.header import Entry
from shardcore.domain.checkpoints.index import Index, StoredFile, StoredVariable
from shardcore.domain.errors import CheckpointError
from shardcore.ports.checkpoints import Reader


@attrs.frozen
class FolderStore:
    """Checkpoints in folders, each with one file for each rank that saved it."""

    begin = staticmethod(folders.begin)
    path = staticmethod(folders.path)
    latest = staticmethod(folders.latest)
    find = staticmethod(folders.find)
    index = staticmethod(folders.read_index)
    write = staticmethod(writing.write)

    def check(self, checkpoint: Path, files: Iterable[StoredFile]) -> None:
        """Compares the checksums of `files`."""
        for file in files:
            if safetensors.checksum_of(checkpoint / file.name) != file.sha256:
                raise CheckpointError(
                    f"File {str(checkpoint / file.name)!r} was changed after it was written: its "
                    "checksum differs. Nothing was loaded; use another checkpoint."
                )

    @contextmanager
    def reading(self, checkpoint: Path, index: Index) -> Iterator[Reader]:
        """Opens the files of a checkpoint, each when it is needed first."""
        with ExitStack() as stack:
            yield FolderReader(checkpoint, index, stack)


@attrs.frozen
class FolderReader:
    """An open checkpoint. `stack` closes its files."""

    checkpoint: Path
    index: Index
    stack: ExitStack
    _files: dict[int, SafetensorsFile] = attrs.field(factory=dict, init=False)

    def check(self, variable: StoredVariable, parts: Sequence[Held]) -> None:
        """Compares the headers of the files with the index."""
        for _ in self._copies(variable, parts):
            pass

    def read(
        self,
        variable: StoredVariable,
        parts: Sequence[Held],
        shape: tuple[int, ...],
        target: memoryview,
    ) -> int:
        """Reads parts of a variable, and returns the bytes that were read."""
        return sum(
            file.read(entry, part, target, shape, place)
            for file, entry, part, place in self._copies(variable, parts)
        )

    def _copies(
        self, variable: StoredVariable, parts: Sequence[Held]
    ) -> Iterator[tuple[SafetensorsFile, Entry, Box, Box]]:
        """Yields the pieces that have elements of `parts`: which of them, and where they go."""
        for part in parts:
            for number, common in variable.grid.overlaps(part.full):
                file, box = self._file(variable.files[number]), variable.grid.box(number)
                entry = file.entry(variable.key(box), variable.dtype, box.shape)
                yield file, entry, common.within(box), part.place_of(common)

    def _file(self, number: int) -> SafetensorsFile:
        if number not in self._files:
            path = self.checkpoint / self.index.files[number].name
            self._files[number] = self.stack.enter_context(safetensors.opened(path))
        return self._files[number]
