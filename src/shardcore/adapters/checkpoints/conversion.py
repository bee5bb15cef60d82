"""Conversion between checkpoints and files of Keras or of safetensors, one variable at a time.

The target is written into a folder beside it, and gets its name when it is complete.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import h5py
import ml_dtypes
import numpy as np

from shardcore.adapters.checkpoints import folders, safetensors
from shardcore.adapters.checkpoints.conversion_sources import Source, Variable, open_source
from shardcore.adapters.checkpoints.lease import acquire
from shardcore.domain.checkpoints import hub_format
from shardcore.domain.checkpoints.file_format import header_of
from shardcore.domain.checkpoints.grid import Grid
from shardcore.domain.checkpoints.index import Index, StoredFile, StoredVariable
from shardcore.domain.errors import CheckpointError

_Writer = Callable[[Path, Path, Source, int | None], None]

_CHECKPOINT = re.compile(r"step-\d{8,18}")
_FILE = "rank-00000.safetensors"


@attrs.frozen
class Converted:
    """The report on a conversion.

    Args:
        path: What was written.
        variables: How many variables it has.
        nbytes: The bytes of their values.
        left_out: The variables of the source that files of this format do not have.
    """

    path: str
    variables: int
    nbytes: int
    left_out: tuple[str, ...]


def convert(source: Path, target: Path, max_shard_bytes: int | None = None) -> Converted:
    """Converts a checkpoint or weights to another format. The ending of `target` says which.

    Args:
        source: The folder of a checkpoint, a folder of safetensors files, or a file that ends in
            .safetensors, .weights.h5 or .weights.json.
        target: Such a file or folder. A folder `step-00000012` becomes a checkpoint.
        max_shard_bytes: The size of the files in a folder of safetensors and of .weights.json.

    Raises:
        CheckpointError: If the source is none of these, the target exists, or a variable cannot
            be written in its format.
    """
    if target.exists():
        raise CheckpointError(
            f"{str(target)!r} exists: remove it, or give another target.", name=str(target)
        )
    write = _writer_of(target)
    with open_source(source) as content, _lease_for(target):
        storable, left_out = _divide_storable(content, target)
        unfinished = target.with_name(f"{folders.UNFINISHED}{target.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            write(unfinished, target, attrs.evolve(content, variables=storable), max_shard_bytes)
            _move(unfinished, target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    nbytes, names = sum(variable.nbytes for variable in storable), [v.name for v in left_out]
    return Converted(str(target), len(storable), nbytes, tuple(names))


@contextmanager
def _lease_for(target: Path) -> Iterator[None]:
    """Opens a context in which no job writes checkpoints beside a target that is one."""
    if not _is_checkpoint(target):
        yield
        return
    lease = acquire(target.parent)
    try:
        yield
    finally:
        lease.release()


def _move(unfinished: Path, target: Path) -> None:
    """Renames the written files to `target`; of several files, the one that it names comes last."""
    if _is_folder(target):
        folders.sync(unfinished)
        os.rename(unfinished, target)
    else:
        for file in sorted(unfinished.iterdir(), key=lambda file: file.name == target.name):
            os.rename(file, target.with_name(file.name))
    folders.sync(target.parent)


def _is_folder(target: Path) -> bool:
    return not target.name.endswith((".weights.h5", ".weights.json", ".safetensors"))


def _is_checkpoint(target: Path) -> bool:
    return bool(_CHECKPOINT.fullmatch(target.name))


def _writer_of(target: Path) -> _Writer:
    """Chooses the function that writes the format of a target, by its name.

    Raises:
        CheckpointError: If the name has another ending.
    """
    if target.name.endswith(".weights.h5"):
        return _h5
    if target.name.endswith(".weights.json"):
        return _sharded_h5
    if target.name.endswith(".safetensors"):
        return _safetensors
    if _is_checkpoint(target):
        return _checkpoint
    if target.suffix:
        raise CheckpointError(
            f"{target.name!r} is no target: give a name that ends in .weights.h5, .weights.json or "
            ".safetensors, a folder for safetensors files, or a checkpoint as step-00000012.",
            name=target.name,
        )
    return _sharded_safetensors


def _divide_storable(
    source: Source, target: Path
) -> tuple[tuple[Variable, ...], tuple[Variable, ...]]:
    """Divides the variables into those that the target can store, and the others.

    Keras' weight files have weights and the optimizer, under Keras' keys.

    Raises:
        CheckpointError: If a weight has no such key.
    """
    if not target.name.endswith((".weights.h5", ".weights.json")):
        return source.variables, ()
    storable = [
        variable for variable in source.variables if variable.group in ("model", "optimizer")
    ]
    for variable in storable:
        if "vars" not in variable.name.split("/")[:-1]:
            raise CheckpointError(
                f"Keras saves {variable.name!r} ({variable.path}) in another form, as weights of "
                "layers with LoRA, quantized layers and torch modules: load the checkpoint into "
                "the model, and call model.save_weights().",
                name=variable.name,
            )
    return tuple(storable), tuple(
        variable for variable in source.variables if variable not in storable
    )


def _h5(folder: Path, target: Path, source: Source, _limit: int | None) -> None:
    with h5py.File(folder / target.name, "w") as file:
        for variable in source.variables:
            _write_dataset(file, variable)


def _write_dataset(file: Any, variable: Variable) -> None:
    is_bfloat16 = variable.dtype == "bfloat16"
    dtype = np.dtype(ml_dtypes.bfloat16 if is_bfloat16 else variable.dtype)
    values = np.frombuffer(variable.read(), dtype).reshape(variable.shape)
    dataset = file.create_dataset(variable.name, data=values)
    if is_bfloat16:
        dataset.attrs["dtype"] = "bfloat16"


def _sharded_h5(folder: Path, target: Path, source: Source, limit: int | None) -> None:
    """Writes Keras' sharded weights: several files, and the map from groups to them."""
    stem = target.name.removesuffix(".weights.json")
    groups: dict[str, list[str]] = {}
    parts = hub_format.divide(source.variables, limit or hub_format.DEFAULT_LIMIT)
    for number, part in enumerate(parts):
        name = f"{stem}_{number:05}.weights.h5"
        with h5py.File(folder / name, "w") as file:
            for variable in part:
                _write_dataset(file, variable)
                names = groups.setdefault(f"/{variable.name.rpartition('/')[0]}", [])
                names[:] = dict.fromkeys([*names, name])
    files_of = {key: n[0] if len(n) == 1 else n for key, n in groups.items()}
    (folder / target.name).write_text(json.dumps(_weight_map(source, files_of), indent=4))


def _safetensors(folder: Path, target: Path, source: Source, _limit: int | None) -> None:
    _write_file(folder / target.name, source.variables)


def _sharded_safetensors(folder: Path, target: Path, source: Source, limit: int | None) -> None:
    """Writes a folder of safetensors files with an index, as the Hugging Face hub has it."""
    files = hub_format.files_of(source.variables, limit or hub_format.DEFAULT_LIMIT)
    for name, part in files.items():
        _write_file(folder / name, part)
    if len(files) > 1:
        file_of = {variable.name: name for name, part in files.items() for variable in part}
        (folder / hub_format.INDEX).write_text(json.dumps(_weight_map(source, file_of), indent=2))


def _weight_map(source: Source, files_of: Mapping[str, object]) -> dict[str, object]:
    return hub_format.index_of(sum(variable.nbytes for variable in source.variables), files_of)


def _checkpoint(folder: Path, target: Path, source: Source, _limit: int | None) -> None:
    file = _write_file(folder / _FILE, source.variables)
    variables = tuple(
        StoredVariable(
            name=variable.name,
            path=variable.path,
            group=variable.group,
            dtype=variable.dtype,
            layout="",
            grid=Grid(variable.shape, ((0,),) * len(variable.shape)),
            files=(0,),
        )
        for variable in source.variables
    )
    step = int(target.name.removeprefix("step-"))
    index = Index(step, "converted", {}, variables, (file,), source.state)
    folders.write_index(folder, index)


def _write_file(path: Path, variables: Sequence[Variable]) -> StoredFile:
    header = header_of((variable.name, variable.dtype, variable.shape) for variable in variables)
    return safetensors.write(path, header, (variable.read() for variable in variables))
