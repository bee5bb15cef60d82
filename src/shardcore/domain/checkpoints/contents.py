"""The match of stored variables with those of a model: what fits, and what does not."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs

from shardcore.domain.checkpoints.index import StoredVariable
from shardcore.domain.errors import CheckpointError

_SHOWN = 8  # lines of an error


@attrs.frozen
class Wanted:
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
class Matched:
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
        lines = [*self.problems, *(f"{each} is not in the model" for each in self.unused)]
        if lines:
            further = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            raise CheckpointError(
                "\n  ".join(
                    [
                        f"Checkpoint {checkpoint!r} does not fit the model; nothing was loaded:",
                        *lines[:_SHOWN],
                        *further,
                        "Build and compile the model that was saved, or load what fits with "
                        "strict=False.",
                    ]
                )
            )


def match(
    wanted: Iterable[Wanted], stored: Iterable[StoredVariable], optional: Collection[str]
) -> Matched:
    """Returns which stored variable each wanted one gets, by name, path, shape and dtype.

    Variables of a group in `optional` may be missing, in the checkpoint or in the model.
    Numbers that Keras gives to names are not compared: `dense_3/kernel` is `dense/kernel`.

    Example:
        >>> from shardcore.domain.checkpoints.grid import Grid
        >>> grid = Grid((2,), ((0,),))
        >>> kernel = StoredVariable("vars/0", "a/kernel", "model", "float32", "", grid, (0,))
        >>> wanted = Wanted("vars/0", "a_1/kernel", "model", (3,), "float32")
        >>> match([wanted], [kernel], ()).problems
        ("'vars/0' (a_1/kernel) has shape (3,) in the model, (2,) in the checkpoint",)
    """
    left = {each.name: each for each in stored}
    pairs, problems = {}, []
    for each in wanted:
        found = left.pop(each.name, None)
        if found is None and each.group in optional:
            continue
        problem = "is not in the checkpoint" if found is None else _difference(each, found)
        if problem:
            problems.append(f"{each.name!r} ({each.path}) {problem}")
        elif found is not None:
            pairs[each.name] = found
    return Matched(
        pairs,
        tuple(problems),
        tuple(str(each) for each in left.values() if each.group not in optional),
        tuple(str(each) for each in left.values() if each.group in optional),
    )


def _difference(wanted: Wanted, found: StoredVariable) -> str:
    for what, own, other in (
        ("shape", wanted.shape, found.shape),
        ("dtype", wanted.dtype, found.dtype),
    ):
        if own != other:
            return f"has {what} {own} in the model, {other} in the checkpoint"
    if found.path and _unnumbered(found.path) != _unnumbered(wanted.path):
        return f"is {found.path!r} in the checkpoint"
    return ""


def _unnumbered(path: str) -> str:
    return re.sub(r"_\d+(?=[_/]|$)", "", path)
