"""The sources of a conversion: checkpoints, safetensors files, and Keras' weight files."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import h5py
import numpy as np

from shardcore.adapters.checkpoints import folders, safetensors
from shardcore.adapters.checkpoints.store import FolderStore
from shardcore.domain.checkpoints import file_format
from shardcore.domain.checkpoints.file_format import DTYPES
from shardcore.domain.checkpoints.grid import Box
from shardcore.domain.checkpoints.index import StoredVariable
from shardcore.domain.errors import CheckpointError
from shardcore.ports.checkpoints import Reader

# The most variables of a file: a forged one may link to any number.
_DATASETS = 10**6


@attrs.frozen(eq=False)
class Variable:
    """A variable that is read when it is written.

    Args:
        name: Its name.
        path: Its Keras path, empty if unknown.
        group: What it belongs to, as in the index of a checkpoint.
        dtype: The name of its dtype.
        shape: Its shape.
        read: Returns its bytes in row-major order.
    """

    name: str
    path: str
    group: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], memoryview]

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return int(np.prod(self.shape, dtype=object)) * DTYPES[self.dtype][1]


@attrs.frozen(eq=False)
class Source:
    """The content of a source: the variables, and of a checkpoint the step and the state."""

    variables: tuple[Variable, ...]
    step: int = 0
    state: Mapping[str, Any] = attrs.field(factory=dict)


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Opens a checkpoint, safetensors files or weights of Keras, which the path tells apart.

    Raises:
        CheckpointError: If it is none.
    """
    with ExitStack() as stack:
        if (path / folders.INDEX).exists():
            yield _checkpoint(path, stack)
        elif path.is_dir():
            yield _safetensors(sorted(path.glob("[!.]*.safetensors")), path, stack)
        elif path.name.endswith(".safetensors") and path.is_file():
            yield _safetensors([path], path, stack)
        elif path.name.endswith((".weights.h5", ".weights.json")) and path.is_file():
            yield _keras_weights(path, stack)
        else:
            raise CheckpointError(
                f"{str(path)!r} cannot be converted: give the folder of a checkpoint, a folder of "
                ".safetensors files, or a file that ends in .safetensors, .weights.h5 or "
                ".weights.json.",
                name=str(path),
            )


def _checkpoint(path: Path, stack: ExitStack) -> Source:
    index = folders.read_index(path)
    reader = stack.enter_context(FolderStore().reading(path, index))
    return Source(
        tuple(
            Variable(v.name, v.path, v.group, v.dtype, v.shape, _stored(reader, v))
            for v in index.variables
        ),
        index.step,
        index.state,
    )


def _stored(reader: Reader, variable: StoredVariable) -> Callable[[], memoryview]:
    def read() -> memoryview:
        target = _allocate(variable.name, variable.nbytes)
        reader.read(variable, variable.as_one_part, variable.shape, target)
        return target

    return read


def _allocate(name: str, nbytes: int) -> memoryview:
    try:
        return memoryview(bytearray(nbytes))
    except MemoryError:
        raise CheckpointError(
            f"{name!r} has {nbytes} bytes, for which this host has no memory.", name=name
        ) from None


def _safetensors(paths: Iterable[Path], path: Path, stack: ExitStack) -> Source:
    files = [stack.enter_context(safetensors.open_file(part)) for part in paths]
    pairs = [(name, file) for file in files for name in file.entries]
    if not pairs:
        raise CheckpointError(
            f"{str(path)!r} has no .safetensors file with a tensor.", name=str(path)
        )
    _refuse_twice([name for name, _ in pairs], path)
    return Source(tuple(_of_entry(name, file) for name, file in pairs))


def _of_entry(name: str, file: safetensors.SafetensorsFile) -> Variable:
    entry = file.entries[name]
    whole = Box((0,) * len(entry.shape), entry.shape)

    def read() -> memoryview:
        target = _allocate(name, entry.nbytes)
        file.read(entry, whole, target, entry.shape, whole)
        return target

    return Variable(name, "", _group_of(name), entry.dtype, entry.shape, read)


def _keras_weights(path: Path, stack: ExitStack) -> Source:
    paths = [path] if path.suffix == ".h5" else _files_of(path)
    try:
        for part in paths:
            folders.check(part)
        files = [stack.enter_context(h5py.File(part, "r")) for part in paths]
        datasets = (pair for file in files for pair in _datasets(file, set()))
        pairs = list(islice(datasets, _DATASETS + 1))
        if len(pairs) > _DATASETS:
            raise CheckpointError(
                f"{str(path)!r} has more than {_DATASETS} variables.", name=str(path)
            )
        variables = tuple(_of_dataset(name, dataset) for name, dataset in pairs)
    except (OSError, KeyError, RuntimeError, TypeError, UnicodeError) as error:
        raise CheckpointError(
            f"{str(path)!r} is no file of Keras' weights: {error}", name=str(path)
        ) from None
    _refuse_twice([name for name, _ in pairs], path)
    return Source(variables)


def _files_of(path: Path) -> list[Path]:
    names = {name for listed in weight_map(path).values() for name in listed}
    return [path.with_name(name) for name in sorted(names)]


def weight_map(path: Path) -> dict[str, list[str]]:
    """Reads the index of several files: for each key, or group of variables, its files.

    Raises:
        CheckpointError: If it is none, or names a file outside of its folder.
    """
    try:
        text = folders.read(path, file_format.HEADER_BYTES)
        content: Any = file_format.parse_json(text, file_format.HEADER_BYTES)
        files_of = {
            key: [listed] if isinstance(listed, str) else list(listed)
            for key, listed in content["weight_map"].items()
        }
        names = {name for listed in files_of.values() for name in listed}
        if all(files_of.values()) and all(Path(name).name == name for name in names):
            return files_of
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"Expected a 'weight_map' from variables to files in {str(path)!r}, got {error!r}: "
            "give the index that Keras, Transformers or shardcore wrote.",
            name=str(path),
            got=repr(error),
        ) from None
    raise CheckpointError(
        f"{str(path)!r} names files outside of its folder, which are not read: move "
        "them beside it, and name them in it without a folder.",
        name=str(path),
    )


def _datasets(group: Any, seen: set[int], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the datasets below a group. Links to other files are refused, and second ones."""
    address = h5py.h5o.get_info(group.id).addr
    if address in seen or prefix.count("/") > file_format.NESTING:
        raise CheckpointError(
            f"{prefix[:80]!r} is linked twice, or nested too deep.", name=prefix[:80]
        )
    seen.add(address)
    for name in group:
        path = f"{prefix}{name}"
        item = group[name] if isinstance(group.get(name, getlink=True), h5py.HardLink) else None
        if isinstance(item, h5py.Group):
            yield from _datasets(item, seen, f"{path}/")
        elif isinstance(item, h5py.Dataset) and not item.external and not item.is_virtual:
            yield path, item
        else:
            raise CheckpointError(
                f"{path!r} is a link to another place: it is not followed.", name=path
            )


def _of_dataset(name: str, dataset: Any) -> Variable:
    dtype = str(dataset.attrs.get("dtype", dataset.dtype))
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{name!r} has dtype {dtype[:80]!r}, expected one of {', '.join(DTYPES)}: cast it "
            "first.",
            name=name,
        )
    nbytes = int(np.prod(dataset.shape, dtype=object)) * DTYPES[dtype][1]
    if dataset.dtype.itemsize != DTYPES[dtype][1] or dataset.id.get_storage_size() < nbytes:
        raise CheckpointError(
            f"Expected {nbytes} bytes of {name!r} in the file, which has fewer: it is damaged or "
            "compressed. Save the weights again.",
            name=name,
        )

    def read() -> memoryview:
        return np.ascontiguousarray(dataset[()]).reshape(-1).view(np.uint8).data

    return Variable(name, "", _group_of(name), dtype, tuple(dataset.shape), read)


def _group_of(name: str) -> str:
    return "optimizer" if name.startswith("optimizer/") else "model"


def _refuse_twice(names: list[str], path: Path) -> None:
    twice = file_format.first_repeated(names)
    if twice is not None:
        raise CheckpointError(
            f"Expected each variable once in {str(path)!r}, but {twice!r} is there twice: remove "
            "the file that does not belong to this model.",
            name=str(path),
        )
