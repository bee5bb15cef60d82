"""The port `WeightStore` by `torch.distributed.checkpoint`, whose files torch reads and writes.

Planners of shardcore tell torch the parts: its planners know no layouts but those of DTensors.
"""

import math
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.overrides import TorchFunctionMode

from shardcore.domain.checkpoints.grid import Box, intersection
from shardcore.domain.checkpoints.weight_keys import FileTensor
from shardcore.domain.errors import CheckpointError
from shardcore.ports.checkpoints import PartToWrite, WeightReader, WeightTarget

_METADATA = ".metadata"  # the file that torch writes last


class _Reader(FileSystemReader):
    """Reads the metadata once: torch would, for each part."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metadata = super().read_metadata()

    def read_metadata(self, *_args: object, **_kwargs: object) -> Metadata:
        return self.metadata


@attrs.frozen(eq=False)
class DcpReader:
    """An open checkpoint of torch; `tensors` has those in it."""

    tensors: Mapping[str, FileTensor]
    _reader: _Reader
    _missing: Mapping[str, str]  # by key, a file of its chunks that is missing

    def problem(self, tensor: FileTensor) -> str:
        """Compares the chunks of a tensor with its shape, and looks for their files."""
        chunks = self._chunks(tensor)
        if sum(chunk.elements for chunk in chunks) != math.prod(tensor.shape):
            return "has chunks that do not make up the tensor"
        missing = self._missing.get(tensor.key)
        return f"has a chunk in file {missing!r}, which is missing" if missing else ""

    def units(self, tensor: FileTensor, box: Box) -> list[Box]:
        """Lists the stored chunks that have elements of `box`, which torch reads as wholes.

        Raises:
            CheckpointError: If they lack some.
        """
        common = {chunk: intersection(chunk, box) for chunk in self._chunks(tensor)}
        units = [chunk for chunk, part in common.items() if min(part.shape, default=1) > 0]
        if sum(common[chunk].elements for chunk in units) != box.elements:
            raise CheckpointError(
                f"The chunks of {tensor.key!r} do not make up the tensor: the checkpoint is "
                "damaged, use another one.",
                name=tensor.key,
            )
        return units

    def read(self, tensor: FileTensor, box: Box) -> tuple[memoryview, int]:
        """Reads a chunk."""
        planner = _LoadPlanner(tensor.key, box)
        with _calling_torch(), _WithoutCopy() as loaded:
            load({}, storage_reader=self._reader, planner=planner, no_dist=True)
        data = loaded.value.contiguous().view(-1).view(torch.uint8).numpy().data
        return data, data.nbytes

    def _chunks(self, tensor: FileTensor) -> list[Box]:
        stored = self._reader.metadata.state_dict_metadata[tensor.key]
        assert isinstance(stored, TensorStorageMetadata)
        return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]


class _WithoutCopy(TorchFunctionMode):
    """Keeps the tensor that torch has read, instead of a copy of it in the planner's tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.empty(0)

    def __torch_function__(
        self, function: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.copy_ and args[0].is_meta:
            self.value = args[1]
        return function(*args, **(kwargs or {}))


class _LoadPlanner(LoadPlanner):
    """Plans to read one chunk of one tensor."""

    def __init__(self, key: str, chunk: Box) -> None:
        self._key, self._chunk = key, chunk

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Does nothing: the chunk is known."""

    def create_local_plan(self) -> LoadPlan:
        start = torch.Size((0,) * len(self._chunk.shape))
        return LoadPlan(
            [
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(self._key),
                    dest_offsets=start,
                    storage_index=MetadataIndex(self._key, self._chunk.start),
                    storage_offsets=start,
                    lengths=torch.Size(self._chunk.shape),
                )
            ]
        )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Does nothing: only tensors are planned."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty(tuple(read_item.lengths), device="meta")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Does nothing: `_WithoutCopy` has the tensor."""


class _SavePlanner(SavePlanner):
    """Plans to write the parts of this rank, each as a chunk."""

    def __init__(self, parts: Sequence[PartToWrite]) -> None:
        self._parts = {(part.tensor.key, part.box.start): part for part in parts}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Does nothing: the parts are known."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_item(part) for part in self._parts.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        part = self._parts[write_item.index.fqn, tuple(write_item.index.offset or ())]
        return _view(part.values(), part.tensor, part.box.shape)


def _item(part: PartToWrite) -> WriteItem:
    offsets = torch.Size(part.box.start)
    return WriteItem(
        index=MetadataIndex(part.tensor.key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, torch.Size(part.box.shape)),
            TensorProperties(dtype=getattr(torch, part.tensor.dtype)),
            torch.Size(part.tensor.shape),
        ),
    )


@attrs.frozen
class DcpFolders:
    """Folders that `torch.distributed.checkpoint` reads and writes."""

    def find(self, path: Path) -> Path:
        """Takes the path as it is."""
        return path

    @contextmanager
    def reading(self, path: Path) -> Iterator[WeightReader]:
        """Opens a folder. Its metadata is a pickle, which can run code."""
        if not (path / _METADATA).is_file():
            raise CheckpointError(
                f"{str(path)!r} is no complete checkpoint of torch: it has no file {_METADATA!r}. "
                "Give the folder that torch.distributed.checkpoint.save() has written.",
                name=str(path),
            )
        reader = _Reader(path)
        tensors = reader.metadata.state_dict_metadata.items()
        places = reader.metadata.storage_data.items()
        missing = {
            index.fqn: place.relative_path
            for index, place in places
            if not (path / place.relative_path).is_file()
        }
        yield DcpReader({key: _tensor(key, stored) for key, stored in tensors}, reader, missing)

    def check(self, target: WeightTarget) -> None:
        """Refuses a folder that is not empty, and tensors that torch would leave out."""
        empty = next((tensor.key for tensor in target.tensors if 0 in tensor.shape), None)
        if empty is not None:
            raise CheckpointError(
                f"{empty!r} has no elements, which a folder of torch.distributed.checkpoint cannot "
                "tell: give None as its key.",
                name=empty,
            )
        if target.path.exists() and any(target.path.iterdir()):
            raise CheckpointError(
                f"{str(target.path)!r} is not empty: remove it, or give another folder.",
                name=str(target.path),
            )

    def begin(self, target: WeightTarget) -> None:
        """Makes the folder."""
        target.path.mkdir(parents=True, exist_ok=True)

    def write(self, target: WeightTarget, parts: Sequence[PartToWrite]) -> None:
        """Writes the file of this rank; torch writes the metadata when all have."""
        with _calling_torch():
            save({}, storage_writer=FileSystemWriter(target.path), planner=_SavePlanner(parts))

    def complete(self, target: WeightTarget) -> None:
        """Does nothing: a folder with metadata is complete."""

    def discard(self, target: WeightTarget) -> None:
        """Removes the folder, unless it is complete."""
        if not (target.path / _METADATA).exists():
            with suppress(OSError):
                shutil.rmtree(target.path)


def _tensor(key: str, stored: object) -> FileTensor:
    """Describes an entry; what is no tensor, such as a number of steps, fits no weight."""
    if not isinstance(stored, TensorStorageMetadata):
        return FileTensor(key, type(stored).__name__, ())
    dtype = str(stored.properties.dtype).removeprefix("torch.")
    return FileTensor(key, dtype, tuple(stored.size))


def _view(data: bytearray | memoryview, tensor: FileTensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=getattr(torch, tensor.dtype)).view(tuple(shape))


@contextmanager
def _calling_torch() -> Iterator[None]:
    """Raises the first error of a rank, and not torch's, which is no `Exception`.

    Torch's warning that one process reads or writes alone is hidden: it is meant here.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        failures = error.failures
        raise failures[min(failures)][0] from None
