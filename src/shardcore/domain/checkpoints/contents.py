"""Variables of a checkpoint: which of them fit those of a model, and which rank writes what.

Each piece is written by one of the ranks that hold it.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs

from shardcore.domain.checkpoints.file_format import DTYPES
from shardcore.domain.checkpoints.grid import Box, Grid, held_parts, holders
from shardcore.domain.checkpoints.index import StoredVariable
from shardcore.domain.errors import CheckpointError
from shardcore.domain.layouts.layout import Layout

_SHOWN = 8  # lines of an error


@attrs.frozen
class VariableToLoad:
    """A variable of the model that is to be loaded."""

    name: str
    path: str
    group: str
    shape: tuple[int, ...]
    dtype: str


@attrs.frozen
class Loaded:
    """The report on a checkpoint that was loaded.

    Args:
        path: The folder of the checkpoint.
        step: The training step at which it was saved.
        state: What the caller of `save_checkpoint` gave as `state`.
        variables: The names of the variables that were loaded.
        problems: A line for each variable of the model that was not; empty if strict.
        unused: The stored variables that were not loaded.
        bytes_read: The bytes of values that this rank read.

    Example:
        >>> report = Loaded("checkpoints/step-00000012", 12, {"epoch": 3}, ("kernel",), (), (), 64)
        >>> report.step, report.state, report.problems
        (12, {'epoch': 3}, ())
    """

    path: str
    step: int
    state: Mapping[str, Any]
    variables: tuple[str, ...]
    problems: tuple[str, ...]
    unused: tuple[str, ...]
    bytes_read: int


@attrs.frozen
class VariableMatch:
    """The variables that can be loaded, and the problems of the others.

    Args:
        pairs: The stored variable for each name that fits.
        problems: A line for each variable that is missing, or that does not fit.
        unused: The stored variables that the model lacks.
        optional: Those of them that a checkpoint may have in addition.
    """

    pairs: Mapping[str, StoredVariable]
    problems: tuple[str, ...]
    unused: tuple[str, ...]
    optional: tuple[str, ...]

    def check(self, checkpoint: str) -> None:
        """Raises if a variable has a problem, or a stored one is unused.

        Raises:
            CheckpointError: With a line for each of them, up to eight.
        """
        lines = [*self.problems, *(f"{variable} is not in the model" for variable in self.unused)]
        if lines:
            raise CheckpointError(
                error_text(
                    f"Checkpoint {checkpoint!r} does not fit the model; nothing was loaded:",
                    lines,
                    "Build and compile the model that was saved, or load what fits with "
                    "strict=False.",
                )
            )


def error_text(headline: str, lines: Sequence[str], remedy: str) -> str:
    """Joins the lines of an error, up to eight of them.

    Example:
        >>> print(error_text("Two problems:", ["a is missing", "b is missing"], "Add them."))
        Two problems:
          a is missing
          b is missing
          Add them.
    """
    further = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n  ".join([headline, *lines[:_SHOWN], *further, remedy])


def match(
    wanted: Iterable[VariableToLoad], stored: Iterable[StoredVariable], optional: Collection[str]
) -> VariableMatch:
    """Pairs wanted variables with stored ones, by name, path, shape and dtype.

    Variables of a group in `optional` may be missing, in the checkpoint or in the model.
    Numbers that Keras gives to names are not compared: `dense_3/kernel` is `dense/kernel`.

    Example:
        >>> from shardcore.domain.checkpoints.grid import Grid
        >>> grid = Grid((2,), ((0,),))
        >>> kernel = StoredVariable("vars/0", "a/kernel", "model", "float32", "", grid, (0,))
        >>> wanted = VariableToLoad("vars/0", "a_1/kernel", "model", (3,), "float32")
        >>> match([wanted], [kernel], ()).problems
        ("'vars/0' (a_1/kernel) has shape (3,) in the model, (2,) in the checkpoint",)
    """
    left = {variable.name: variable for variable in stored}
    pairs, problems = {}, []
    for variable in wanted:
        candidate = left.pop(variable.name, None)
        if candidate is None and variable.group in optional:
            continue
        problem = (
            "is not in the checkpoint" if candidate is None else _difference(variable, candidate)
        )
        if problem:
            problems.append(f"{variable.name!r} ({variable.path}) {problem}")
        elif candidate is not None:
            pairs[variable.name] = candidate
    return VariableMatch(
        pairs,
        tuple(problems),
        tuple(str(variable) for variable in left.values() if variable.group not in optional),
        tuple(str(variable) for variable in left.values() if variable.group in optional),
    )


def _difference(wanted: VariableToLoad, stored: StoredVariable) -> str:
    for what, own, other in (
        ("shape", wanted.shape, stored.shape),
        ("dtype", wanted.dtype, stored.dtype),
    ):
        if own != other:
            return f"has {what} {own} in the model, {other} in the checkpoint"
    if stored.path and _unnumbered(stored.path) != _unnumbered(wanted.path):
        return f"is {stored.path!r} in the checkpoint"
    return ""


def _unnumbered(path: str) -> str:
    return re.sub(r"_\d+(?=[_/]|$)", "", path)


@attrs.frozen
class VariableToStore:
    """A variable that is to be stored. `layout` is its storage layout."""

    name: str
    path: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout


@attrs.frozen
class Piece:
    """A piece that a rank writes.

    Args:
        key: Its key in the file of a checkpoint.
        dtype: The name of its dtype.
        variable: The name of the variable.
        full: The part of the full variable.
        local: The same part of the rank's local shard.
    """

    key: str
    dtype: str
    variable: str
    full: Box
    local: Box


def divide(variables: Iterable[VariableToStore]) -> list[StoredVariable]:
    """Chooses the rank that writes each piece, which is the number of the piece's file.

    Of the ranks that hold a piece it is the one with the fewest bytes so far, so that the copies
    of replicated variables are written once, and by all ranks in turn. It is equal on all ranks.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> layout = Layout(Mesh((2,), ("data",)), (None,))
        >>> variables = [VariableToStore(name, "", "model", (4,), "int8", layout) for name in "abc"]
        >>> [variable.files for variable in divide(variables)]
        [(0,), (1,), (0,)]
    """
    stored = []
    load: dict[int, int] = {}
    for variable in variables:
        grid, width = Grid.of(variable.layout, variable.shape), DTYPES[variable.dtype][1]
        files = []
        for box, ranks in zip(grid.boxes(), holders(variable.layout, grid), strict=True):
            rank = min(ranks or [0], key=lambda rank: (load.get(rank, 0), rank))
            load[rank] = load.get(rank, 0) + box.elements * width
            files.append(rank)
        stored.append(
            StoredVariable(
                variable.name,
                variable.path,
                variable.group,
                variable.dtype,
                str(variable.layout),
                grid,
                tuple(files),
            )
        )
    return stored


def pieces_of_rank(variables: Iterable[tuple[StoredVariable, Layout]], rank: int) -> list[Piece]:
    """Lists the pieces that `rank` writes, each as a box of its local shard."""
    written = []
    for variable, layout in variables:
        for part in held_parts(layout, variable.shape, rank):
            for number, common in variable.grid.overlaps(part.full):
                if variable.files[number] == rank:
                    key, box = variable.key(variable.grid.box(number)), part.local_box(common)
                    written.append(Piece(key, variable.dtype, variable.name, common, box))
    return written
