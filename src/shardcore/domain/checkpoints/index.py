"""The index of a checkpoint: its variables, the files of their pieces, and the state of training.

It is written as JSON, with a checksum of its content. Reading checks everything that it says.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import attrs

from shardcore.domain.checkpoints import file_format
from shardcore.domain.checkpoints.file_format import (
    DTYPES,
    REMEDY,
    check_texts,
    fields_of,
    names_in,
    numbers_of,
)
from shardcore.domain.checkpoints.grid import Box, Grid, HeldPart
from shardcore.domain.errors import CheckpointError

FORMAT = 1

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_TEXTS = ("name", "path", "group", "dtype", "layout")  # the fields of a variable that are texts
_CHECKSUM = re.compile(r"[0-9a-f]{64}")


def _plain(state: Mapping[str, object]) -> dict[str, Any]:
    """Copies `state` as JSON has it: tuples are lists, keys are texts."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"The state to be saved is no JSON ({error}): give None, bools, numbers, texts, and "
            "lists and dicts of them."
        ) from None
    return copied


@attrs.frozen
class StoredFile:
    """A file of a checkpoint: its name in the folder, its size in bytes, its SHA-256."""

    name: str
    size: int
    sha256: str

    def __attrs_post_init__(self) -> None:
        if len(self.name) > 255 or not _FILE.fullmatch(self.name):
            raise CheckpointError(
                f"File {self.name[:255]!r} of the index is no name of a .safetensors file in the "
                "folder.",
                name=self.name[:255],
            )
        if not 0 <= self.size <= file_format.NUMBER or not _CHECKSUM.fullmatch(self.sha256):
            raise CheckpointError(
                f"File {self.name!r} of the index has no size or no checksum.", name=self.name
            )


@attrs.frozen
class StoredVariable:
    """A variable of a checkpoint, and the files of its pieces.

    Args:
        name: Its unique name: the key in Keras' weight files, where it has one.
        path: Its Keras path when it was saved, empty if unknown.
        group: What it belongs to: "model", "seeds", "optimizer", "metrics" or "callbacks".
        dtype: Its dtype: "float32".
        layout: The layout in which it was saved, for people.
        grid: Its shape and its pieces.
        files: For each piece the number of its file in the index.

    Raises:
        CheckpointError: If the dtype is unknown, or there is not one file for each piece.
    """

    name: str
    path: str
    group: str
    dtype: str
    layout: str
    grid: Grid
    files: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"Variable {self.name!r} has the unknown dtype {self.dtype!r}.", name=self.name
            )
        if len(self.files) != math.prod(self.grid.counts):
            raise CheckpointError(
                f"Variable {self.name!r} has {math.prod(self.grid.counts)} pieces, but "
                f"{len(self.files)} files.",
                name=self.name,
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.grid.shape

    @property
    def nbytes(self) -> int:
        """The bytes of all its elements."""
        return file_format.nbytes_of(self.dtype, self.shape)

    @property
    def as_one_part(self) -> list[HeldPart]:
        """The full variable, as the one part that is wanted."""
        box = Box((0,) * len(self.shape), self.shape)
        return [HeldPart(box, box)]

    def __str__(self) -> str:
        return f"{self.name!r} ({self.path})" if self.path else repr(self.name)

    def key(self, box: Box) -> str:
        """Names a piece in its file: by the variable, and by the slice if there are several.

        Example:
            >>> grid = Grid((4, 6), ((0, 2), (0,)))
            >>> variable = StoredVariable("vars/0", "", "model", "float32", "", grid, (0, 1))
            >>> [variable.key(box) for box in grid.boxes()]
            ['vars/0[0:2, 0:6]', 'vars/0[2:4, 0:6]']
        """
        if len(self.files) == 1:
            return self.name
        return f"{self.name}[{', '.join(f'{s.start}:{s.stop}' for s in box.slices)}]"


@attrs.frozen
class Index:
    """A checkpoint without its values.

    Args:
        step: The training step at which it was saved.
        mesh: The mesh on which it was saved, for people.
        versions: The releases of shardcore, Keras and torch that saved it.
        variables: The variables.
        files: The files; none before they are written.
        state: What is saved besides variables: of training, of callbacks, of the caller.

    Raises:
        CheckpointError: If two variables or two files have one name, or the state is no JSON.
    """

    step: int
    mesh: str
    versions: Mapping[str, str]
    variables: tuple[StoredVariable, ...]
    files: tuple[StoredFile, ...]
    state: Mapping[str, Any] = attrs.field(converter=_plain)

    def __attrs_post_init__(self) -> None:
        if self.step < 0:
            raise CheckpointError(
                f"Expected a step of at least 0, got {self.step}.", got=str(self.step)
            )
        _refuse_twice("variable", [variable.name for variable in self.variables])
        _refuse_twice("file", [file.name for file in self.files])

    @property
    def nbytes(self) -> int:
        """The bytes of all variables."""
        return sum(variable.nbytes for variable in self.variables)

    def to_text(self) -> str:
        """Writes the index as JSON: its checksum, and its content."""
        content = {name: getattr(self, name) for name in ("step", "mesh", "versions", "state")}
        content["variables"] = [_flat(variable) for variable in self.variables]
        content["files"] = [attrs.asdict(file) for file in self.files]
        return json.dumps(
            {"shardcore_checkpoint": FORMAT, "sha256": _digest(content), "content": content},
            indent=1,
        )


def index_from(text: bytes) -> Index:
    """Parses the text of an index and checks all that it says.

    Raises:
        CheckpointError: If it is no index, one of another format, or was changed.

    Example:
        >>> index = Index(3, "(data=2)", {}, (), (), {})
        >>> index_from(index.to_text().encode()) == index
        True
    """
    try:
        document = file_format.parse_json(text, file_format.INDEX_BYTES)
    except CheckpointError as error:
        raise CheckpointError(f"The index cannot be read: {error}; {REMEDY}.") from None
    kinds = {"shardcore_checkpoint": int, "sha256": str, "content": dict}
    fields = fields_of(document, kinds)
    number = fields["shardcore_checkpoint"]
    if number != FORMAT:
        said = number if abs(number) < file_format.NUMBER else "another"
        raise CheckpointError(
            f"The index has format {said}, but this release of shardcore reads format {FORMAT}: "
            "read it with the release that wrote it."
        )
    for what in ("variable", "file"):  # before the rest, which takes ten times as long
        _refuse_twice(what, names_in(fields["content"].get(f"{what}s")))
    if fields["sha256"] != _digest(fields["content"]):
        raise CheckpointError(
            f"The index was changed after it was written: its checksum differs; {REMEDY}."
        )
    return _index(fields["content"])


def _index(content: object) -> Index:
    kinds = {
        "step": int, "mesh": str, "versions": dict, "variables": list, "files": list, "state": dict,
    }  # fmt: skip
    fields = fields_of(content, kinds)
    check_texts([fields["mesh"], *fields["versions"], *fields["versions"].values()])
    if not 0 <= fields["step"] <= file_format.NUMBER:
        raise CheckpointError(f"Expected a step of at least 0 and below 2**63: {REMEDY}.")
    if file_format.is_nested_deeper(fields["state"]):
        raise CheckpointError(f"The state in the index is nested too deep: {REMEDY}.")
    fields["variables"] = tuple(map(_variable, fields["variables"]))
    kinds = {"name": str, "size": int, "sha256": str}
    fields["files"] = tuple(StoredFile(**fields_of(file, kinds)) for file in fields["files"])
    index = Index(**fields)
    for variable in index.variables:
        if min(variable.files) < 0 or max(variable.files) >= len(index.files):
            raise CheckpointError(f"Variable {variable} is in a file that the index has not.")
    if index.nbytes > sum(file.size for file in index.files):
        raise CheckpointError(f"The variables have more bytes than the files: {REMEDY}.")
    return index


def _flat(variable: StoredVariable) -> dict[str, Any]:
    fields, grid = {name: getattr(variable, name) for name in _TEXTS}, variable.grid
    return fields | {"shape": grid.shape, "cuts": grid.cuts, "files": variable.files}


def _variable(content: object) -> StoredVariable:
    kinds = dict.fromkeys(_TEXTS, str) | dict.fromkeys(("shape", "cuts", "files"), list)
    fields: dict[str, Any] = fields_of(content, kinds)
    name = fields["name"]
    check_texts([fields[key] for key in _TEXTS])
    if len(fields["shape"]) > file_format.DIMS:
        raise CheckpointError(
            f"Variable {name!r} has more than {file_format.DIMS} dims: {REMEDY}.", name=name
        )
    shape, files = numbers_of(fields.pop("shape"), name), numbers_of(fields.pop("files"), name)
    cuts = tuple(numbers_of(dim_cuts, name) for dim_cuts in fields.pop("cuts"))
    try:
        return StoredVariable(**fields, grid=Grid(shape, cuts), files=files)
    except CheckpointError as error:
        raise CheckpointError(f"Variable {name!r} of the index: {error}", name=name) from None


def _refuse_twice(what: str, names: list[str]) -> None:
    twice = file_format.first_repeated(names)
    if twice is not None:
        raise CheckpointError(
            f"The index has {what} {twice[:200]!r} twice: {REMEDY}.", name=twice[:200]
        )


def _digest(content: object) -> str:
    """Computes the SHA-256 of `content`, however its JSON is laid out."""
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise CheckpointError(f"The index is nested too deep: {REMEDY}.") from None
    return hashlib.sha256(text.encode()).hexdigest()
