"""The port `WeightStore`, for reading alone, by folders that Keras' `OrbaxCheckpoint` has written.

TensorStore reads them, which is a part of the package `orbax-checkpoint`; JAX is not needed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from shardcore.adapters.checkpoints import folders
from shardcore.domain.checkpoints import file_format
from shardcore.domain.checkpoints.grid import Box, Grid
from shardcore.domain.checkpoints.weight_keys import FileTensor, state_tree_key
from shardcore.domain.errors import CheckpointError, EnvironmentProblem
from shardcore.ports.checkpoints import WeightReader

_METADATA = Path("pytree", "_METADATA")
_METRICS = "metrics_variables"
_SHOWN = 300  # characters of an error


@attrs.frozen(eq=False)
class OrbaxReader:
    """An open folder; `arrays` has the array of TensorStore by the key of each tensor."""

    tensors: Mapping[str, FileTensor]
    _arrays: Mapping[str, Any]

    def problem(self, tensor: FileTensor) -> str:
        """Finds nothing: a chunk that is missing is an error when it is read."""
        return ""

    def units(self, tensor: FileTensor, box: Box) -> list[Box]:
        """Lists the stored chunks that have elements of `box`: each is compressed by itself."""
        sizes = self._arrays[tensor.key].chunk_layout.read_chunk.shape or tensor.shape
        cuts = (range(0, max(dim, 1), size) for dim, size in zip(tensor.shape, sizes, strict=True))
        grid = Grid(tensor.shape, tuple(map(tuple, cuts)))
        return [grid.box(number) for number, _ in grid.overlaps(box)]

    def read(self, tensor: FileTensor, box: Box) -> tuple[memoryview, int]:
        """Reads a chunk."""
        try:
            values = self._arrays[tensor.key][box.slices].read(order="C").result()
        except ValueError as error:
            raise CheckpointError(
                f"{tensor.key!r} cannot be read ({str(error)[:_SHOWN]}): the checkpoint "
                "is damaged, use another one.",
                name=tensor.key,
            ) from None
        data = values.reshape(-1).view("uint8").data
        return data, data.nbytes


@attrs.frozen
class OrbaxFolders:
    """Folders of `OrbaxCheckpoint`, each with a folder per step."""

    def find(self, path: Path) -> Path:
        """Takes the folder of a step as it is, else the newest step in it."""
        steps = (step for step in path.glob("[0-9]*") if step.name.isdigit())
        complete = [step for step in steps if (step / _METADATA).is_file()]
        if (path / _METADATA).is_file() or not complete:
            return path
        return max(complete, key=lambda step: int(step.name))

    @contextmanager
    def reading(self, path: Path) -> Iterator[WeightReader]:
        """Opens the folder of a step."""
        if not (path / _METADATA).is_file():
            raise CheckpointError(
                f"{str(path)!r} has no file {str(_METADATA)!r}: give a folder that Keras' "
                "OrbaxCheckpoint has written, or that of a step in it.",
                name=str(path),
            )
        arrays = _arrays(path / _METADATA)
        tensors = {
            key: FileTensor(key, array.dtype.name, array.shape) for key, array in arrays.items()
        }
        yield OrbaxReader(tensors, arrays)


def _arrays(metadata: Path) -> dict[str, Any]:
    """Opens the arrays, without those of metrics, which begin at zero in each epoch."""
    tensorstore = _tensorstore()
    try:
        text = folders.read(metadata, file_format.INDEX_BYTES)
        content: Any = file_format.parse_json(text, file_format.INDEX_BYTES)
        names = [
            [part["key"] for part in array["key_metadata"]]
            for array in content["tree_metadata"].values()
            if not array["value_metadata"]["skip_deserialize"]  # an empty dict
        ]
        opening = {
            state_tree_key(name[0], "/".join(name[1:])): tensorstore.open(
                _spec(metadata.parent, ".".join(name), content), open=True, read=True
            )
            for name in names
            if name[0] != _METRICS
        }
        return {key: array.result() for key, array in opening.items()}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{str(metadata.parent)!r} is no folder that Orbax has written whole "
            f"({str(error)[:_SHOWN]}): use another one.",
            name=str(metadata.parent),
        ) from None


def _spec(folder: Path, name: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Describes an array to TensorStore; a chunk that is missing is no chunk of zeros."""
    if metadata["use_ocdbt"]:
        files = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    else:
        files = {"driver": "file", "path": f"{folder / name}/"}
    return {
        "driver": "zarr3" if metadata["use_zarr3"] else "zarr",
        "kvstore": files,
        "fill_missing_data_reads": False,
    }


def _tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise EnvironmentProblem(
            f"load_orbax() needs the package 'orbax-checkpoint' ({error}): install it with pip.",
            name="orbax-checkpoint",
        ) from None
    return tensorstore
