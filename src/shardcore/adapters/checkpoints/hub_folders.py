"""The port `WeightStore` by safetensors files: one, or a folder of several with their index.

Each rank writes its parts into files that one rank has made, beside the names that they get when
all ranks have written.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

from shardcore.adapters.checkpoints import folders, safetensors
from shardcore.adapters.checkpoints.conversion_sources import weight_map
from shardcore.adapters.checkpoints.safetensors import SafetensorsFile
from shardcore.domain.checkpoints import file_format, hub_format
from shardcore.domain.checkpoints.file_format import header_of
from shardcore.domain.checkpoints.grid import Box
from shardcore.domain.checkpoints.weight_keys import FileTensor
from shardcore.domain.errors import CheckpointError
from shardcore.ports.checkpoints import PartToWrite, WeightReader, WeightTarget

_ENDING = ".safetensors"
_METADATA = {"format": "pt"}  # Transformers reads no file without it


@attrs.frozen(eq=False)
class HubReader:
    """Open safetensors files; `file_of` has the file of each tensor."""

    tensors: Mapping[str, FileTensor]
    file_of: Mapping[str, SafetensorsFile]

    def problem(self, tensor: FileTensor) -> str:
        """Finds nothing: an open file has all bytes of its tensors."""
        return ""

    def units(self, tensor: FileTensor, box: Box) -> list[Box]:
        """Takes any part as it is."""
        return [box]

    def read(self, tensor: FileTensor, box: Box) -> tuple[memoryview, int]:
        """Reads the bytes of a part of a tensor, and no others."""
        file = self.file_of[tensor.key]
        data = memoryview(bytearray(file_format.nbytes_of(tensor.dtype, box.shape)))
        whole = Box((0,) * len(box.shape), box.shape)
        return data, file.read(file.entries[tensor.key], box, data, box.shape, whole)


@attrs.frozen
class HubFolders:
    """Safetensors files as Transformers and the Hugging Face hub have them."""

    def find(self, path: Path) -> Path:
        """Takes the path as it is."""
        return path

    @contextmanager
    def reading(self, path: Path) -> Iterator[WeightReader]:
        """Opens a file, or a folder of files, which has an index if a key tells its file."""
        with ExitStack() as stack:
            files = {
                file.name: stack.enter_context(safetensors.open_file(file)) for file in _files(path)
            }
            file_of = dict(_keys(path, files))
            tensors = {key: _tensor(key, file) for key, file in file_of.items()}
            yield HubReader(tensors, file_of)

    def check(self, target: WeightTarget) -> None:
        """Refuses a folder that has weights."""
        if _is_folder(target.path):
            old = sorted(file.name for file in target.path.glob("[!.]*.safetensors*"))
            if old:
                raise CheckpointError(
                    f"{str(target.path)!r} has {old[0]!r} already: remove the weights in it, or "
                    "give another folder.",
                    name=str(target.path),
                )

    def begin(self, target: WeightTarget) -> None:
        """Makes the unfinished files, in place of those that an earlier save has left."""
        _folder(target.path).mkdir(parents=True, exist_ok=True)
        self.discard(target)
        for name, tensors in _planned(target).items():
            safetensors.create(_unfinished(target, name), _header(tensors))

    def write(self, target: WeightTarget, parts: Sequence[PartToWrite]) -> None:
        """Writes the bytes of the parts to where they are in the files."""
        for name, tensors in _planned(target).items():
            keys = {tensor.key for tensor in tensors}
            path, header = _unfinished(target, name), _header(tensors)
            with safetensors.open_for_parts(path, header) as write_part:
                for part in parts:
                    if part.tensor.key in keys:
                        write_part(part.tensor.key, part.box, part.values())

    def complete(self, target: WeightTarget) -> None:
        """Renames the files; the index of several comes last."""
        files, folder = _planned(target), _folder(target.path)
        for name in files:
            os.rename(_unfinished(target, name), folder / name)
        folders.sync(folder)
        if len(files) > 1:
            file_of = {tensor.key: name for name, tensors in files.items() for tensor in tensors}
            index = hub_format.index_of(sum(tensor.nbytes for tensor in target.tensors), file_of)
            unfinished = _unfinished(target, hub_format.INDEX)
            unfinished.write_text(json.dumps(index, indent=2))
            os.rename(unfinished, folder / hub_format.INDEX)
            folders.sync(folder)

    def discard(self, target: WeightTarget) -> None:
        """Removes the unfinished files; in a folder also those of an earlier save."""
        left = [_unfinished(target, name) for name in _planned(target)]
        if _is_folder(target.path):
            left += target.path.glob(f"{folders.UNFINISHED}*{_ENDING}*")
        for path in left:
            path.unlink(missing_ok=True)


def _is_folder(path: Path) -> bool:
    return path.suffix != _ENDING


def _folder(path: Path) -> Path:
    return path if _is_folder(path) else path.parent


def _planned(target: WeightTarget) -> dict[str, list[FileTensor]]:
    """Divides the tensors into files, by name."""
    if not _is_folder(target.path):
        return {target.path.name: list(target.tensors)}
    return hub_format.files_of(target.tensors, target.limit)


def _unfinished(target: WeightTarget, name: str) -> Path:
    """Names a file until it is complete."""
    return _folder(target.path) / f"{folders.UNFINISHED}{name}"


def _header(tensors: Sequence[FileTensor]) -> bytes:
    return header_of(((t.key, t.dtype, t.shape) for t in tensors), _METADATA)


def _files(path: Path) -> list[Path]:
    """Lists the files of a folder, those of its index if it has one; or the one file."""
    if path.is_file():
        return [path]
    index = _index(path)
    if index is None:
        files = sorted(path.glob(f"[!.]*{_ENDING}"))
    else:
        names = {name for listed in weight_map(index).values() for name in listed}
        files = [path / name for name in sorted(names)]
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise CheckpointError(
            f"{index and index.name!r} names {missing.name!r}, which is missing: the folder is "
            "incomplete, copy it again.",
            name=str(path),
        )
    if not files:
        raise CheckpointError(
            f"{str(path)!r} has no {_ENDING} file: give such a file, or a folder of them.",
            name=str(path),
        )
    return files


def _index(path: Path) -> Path | None:
    indices = sorted(path.glob(f"[!.]*{_ENDING}.index.json"))
    if len(indices) > 1:
        raise CheckpointError(
            f"{str(path)!r} has the weights of several models, {indices[0].name!r} and "
            f"{indices[1].name!r}: move one of them to its own folder.",
            name=str(path),
        )
    return indices[0] if indices else None


def _keys(
    path: Path, files: Mapping[str, SafetensorsFile]
) -> Iterator[tuple[str, SafetensorsFile]]:
    """Yields each key with its file.

    Raises:
        CheckpointError: If two files have a key, or the index names a file that lacks it.
    """
    index = None if path.is_file() else _index(path)
    if index is not None:
        for key, (name, *_) in weight_map(index).items():
            if key not in files[name].entries:
                raise CheckpointError(
                    f"{index.name!r} says that {key!r} is in {name!r}, which lacks it: the folder "
                    "is incomplete, copy it again.",
                    name=str(path),
                )
            yield key, files[name]
        return
    twice = file_format.first_repeated([key for file in files.values() for key in file.entries])
    if twice is not None:
        raise CheckpointError(
            f"Two files in {str(path)!r} have {twice!r}: remove the one that does not belong to "
            "the model.",
            name=str(path),
        )
    yield from ((key, file) for file in files.values() for key in file.entries)


def _tensor(key: str, file: SafetensorsFile) -> FileTensor:
    return FileTensor(key, file.entries[key].dtype, file.entries[key].shape)
