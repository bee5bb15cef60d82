"""The division of the writing: each piece is written by one of the ranks that hold it."""

from collections.abc import Iterable

import attrs

from shardcore.domain.checkpoints.grid import Box, Grid, held_parts, holders
from shardcore.domain.checkpoints.index import DTYPES, StoredVariable
from shardcore.domain.layout import Layout


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
    """A piece that a rank writes: its key in the file, and its part of the rank's local shard."""

    key: str
    dtype: str
    variable: str
    local: Box


def divide(variables: Iterable[VariableToStore]) -> list[StoredVariable]:
    """Returns the variables with the rank that writes each piece, as the number of its file.

    Of the ranks that hold a piece it is the one with the fewest bytes so far, so that the copies
    of replicated variables are written once, and by all ranks in turn. It is equal on all ranks.

    Example:
        >>> from shardcore.domain.mesh import Mesh
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
    """Returns the pieces that `rank` writes, in the order of the variables."""
    written = []
    for variable, layout in variables:
        for part in held_parts(layout, variable.shape, rank):
            for number, common in variable.grid.overlaps(part.full):
                if variable.files[number] == rank:
                    begin = common.within(part.full).start
                    at = tuple(a + b for a, b in zip(begin, part.local.start, strict=True))
                    box = Box(at, common.shape)
                    key = variable.key(variable.grid.box(number))
                    written.append(Piece(key, variable.dtype, variable.name, box))
    return written
