"""Rearrangements from a tensor of a file to a variable: dims are divided, permuted and merged.

A rearrangement is written as in einops, `"(h d) m -> m h d"`. It moves elements and changes none,
so each part of the variable is a part of the file's tensor, and the reverse.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product

import attrs

from shardcore.domain.checkpoints.grid import Box
from shardcore.domain.errors import ArgumentProblem

Dims = tuple[tuple[str, ...], ...]  # of each dim the names of its factors, the major first

_DIM = re.compile(r"\(([^()]*)\)|([^\s()]+)")
_FACTOR = re.compile(r"([A-Za-z_]\w*)(?:=([1-9]\d*))?")


@attrs.frozen
class BoxPair:
    """A part of a tensor, in the file and in the variable.

    Args:
        file: The part of the tensor in the file.
        variable: The same elements in the variable.
        factors: The sizes of the factors of the part, in the order of the file.
        order: For each factor, in the order of the variable, its number in `factors`.
    """

    file: Box
    variable: Box
    factors: tuple[int, ...]
    order: tuple[int, ...]


@attrs.frozen
class Rearrangement:
    """A rearrangement of the elements of a tensor.

    Args:
        file: The factors of each dim in the file.
        variable: Those of each dim of the variable.
        sizes: The size of each factor.
    """

    file: Dims
    variable: Dims
    sizes: Mapping[str, int]

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        return self._shape(self.file)

    @property
    def variable_shape(self) -> tuple[int, ...]:
        """The shape of the variable."""
        return self._shape(self.variable)

    def box_pairs(self, part: Box) -> Iterator[BoxPair]:
        """Divides a part of the variable into parts that are boxes in the file too.

        Example:
            >>> heads = rearrangement("(h d) m -> m h d", (6, 2, 4))
            >>> heads.file_shape
            (8, 6)
            >>> [pair.file for pair in heads.box_pairs(Box((0, 1, 0), (6, 1, 4)))]
            [Box(start=(4, 0), shape=(4, 6))]
        """
        if not part.elements:
            return
        in_file, in_variable = ([name for dim in dims for name in dim] for dims in self._sides)
        order = tuple(map(in_file.index, in_variable))
        spans = (
            _spans([self.sizes[name] for name in dim], at, at + size)
            for dim, at, size in zip(self.variable, part.start, part.shape, strict=True)
        )
        for dims in product(*spans):
            ranges = dict(zip(in_variable, (span for dim in dims for span in dim), strict=True))
            for consecutive in self._consecutive(ranges):
                file, variable = (self._box(side, consecutive) for side in self._sides)
                factors = tuple(len(consecutive[name]) for name in in_file)
                yield BoxPair(file, variable, factors, order)

    @property
    def _sides(self) -> tuple[Dims, Dims]:
        return self.file, self.variable

    def _shape(self, dims: Dims) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[name] for name in dim) for dim in dims)

    def _consecutive(self, ranges: Mapping[str, range]) -> Iterator[Mapping[str, range]]:
        """Divides a part of the factors until it is a box on both sides."""
        for dim in (*self.file, *self.variable):
            several = [name for name in dim if len(ranges[name]) > 1]
            if not several:
                continue
            minor = dim[dim.index(several[0]) + 1 :]
            if any(len(ranges[name]) < self.sizes[name] for name in minor):
                for index in ranges[several[0]]:
                    yield from self._consecutive({**ranges, several[0]: range(index, index + 1)})
                return
        yield ranges

    def _box(self, dims: Dims, ranges: Mapping[str, range]) -> Box:
        starts = []
        for dim in dims:
            start = 0
            for name in dim:
                start = start * self.sizes[name] + ranges[name].start
            starts.append(start)
        return Box(tuple(starts), tuple(math.prod(len(ranges[n]) for n in dim) for dim in dims))


def rearrangement(
    pattern: str | None, variable: Sequence[int], file: Sequence[int] | None = None
) -> Rearrangement:
    """Parses a pattern, and finds the sizes of its factors.

    Args:
        pattern: The dims in the file, "->", and those of the variable: words, or words in brackets
            for a dim that is made of several. A size that the shapes do not tell is written
            `h=8`; a dim of size 1 that the other side lacks is `()`. None changes nothing.
        variable: The shape of the variable.
        file: The shape of the tensor in the file; None if it is to be written.

    Raises:
        ArgumentProblem: If it is no such pattern, does not fit a shape, or leaves a size open.

    Example:
        >>> rearrangement("a b -> b a", (2, 3)).file_shape
        (3, 2)
        >>> rearrangement("(h=2 d) -> h d", (2, 3), (8,))
        Traceback (most recent call last):
            ...
        shardcore.domain.errors.ArgumentProblem: has shape (8,) in the file, expected (6,)
    """
    if pattern is None:
        dims = tuple((str(dim),) for dim in range(len(variable)))
        same = Rearrangement(dims, dims, {str(dim): size for dim, size in enumerate(variable)})
        return _of_shape(same, file)
    sides, sizes = _parse(pattern)
    if len(sides[1]) != len(variable):
        raise ArgumentProblem(f"has {len(variable)} dims, but {pattern!r} makes {len(sides[1])}")
    known = list(zip(sides[1], variable, strict=True))
    if file is not None and len(file) == len(sides[0]):
        known += zip(sides[0], file, strict=True)
    for _ in range(len(known)):  # a dim may need the sizes of the next one
        for dim, size in known:
            open_names = [name for name in dim if name not in sizes]
            others = math.prod(sizes[name] for name in dim if name in sizes)
            if len(open_names) == 1 and others and size % others == 0:
                sizes[open_names[0]] = size // others
    unknown = sorted({name for dim in sides[0] for name in dim} - sizes.keys())
    if unknown:
        raise ArgumentProblem(
            f"has shape {tuple(variable)}, which leaves sizes in {pattern!r} open or does not fit "
            f"it: write them, as {unknown[0]}=8"
        )
    parsed = Rearrangement(sides[0], sides[1], sizes)
    if parsed.variable_shape != tuple(variable):
        raise ArgumentProblem(f"has shape {tuple(variable)}, which {pattern!r} does not make")
    return _of_shape(parsed, file)


def _of_shape(parsed: Rearrangement, file: Sequence[int] | None) -> Rearrangement:
    if file is not None and tuple(file) != parsed.file_shape:
        raise ArgumentProblem(
            f"has shape {tuple(file)} in the file, expected {parsed.file_shape}",
            expected=str(parsed.file_shape),
            got=str(tuple(file)),
        )
    return parsed


def _parse(pattern: str) -> tuple[list[Dims], dict[str, int]]:
    sizes: dict[str, int] = {}
    sides = []
    for text in pattern.split("->"):
        dims = []
        for several, one in _DIM.findall(text):
            factors = [_FACTOR.fullmatch(word) for word in (one or several).split()]
            names = tuple(factor[1] for factor in factors if factor)
            sizes |= {factor[1]: int(factor[2]) for factor in factors if factor and factor[2]}
            dims.append(names if len(names) == len(factors) else ("", ""))
        dims = [("", "")] if _DIM.sub("", text).strip() else dims
        sides.append(tuple(dims))
    names_of_sides = [sorted(name for dim in dims for name in dim) for dims in sides]
    is_valid = len(sides) == 2 and names_of_sides[0] == names_of_sides[1]
    if not is_valid or len(set(names_of_sides[0])) < len(names_of_sides[0]):
        raise ArgumentProblem(
            f"has the transform {pattern!r}, expected the dims in the file and those of the "
            'variable, each word once on each side, as "(h d) m -> m h d"',
            name=pattern,
        )
    return sides, sizes


def _spans(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[range, ...]]:
    """Divides a range of a dim into boxes of its factors."""
    if len(sizes) < 2:
        yield (range(start, stop),)[: len(sizes)]
        return
    inner = math.prod(sizes[1:])
    whole = (-(-start // inner) * inner, stop // inner * inner)  # whole rows are between them
    cuts = sorted({start, stop, *(cut for cut in whole if start < cut < stop)})
    for begin, end in pairwise(cuts):
        row, at = divmod(begin, inner)
        if at == 0 and end % inner == 0:
            yield range(row, end // inner), *map(range, sizes[1:])
        else:
            for rest in _spans(sizes[1:], at, at + end - begin):
                yield range(row, row + 1), *rest
