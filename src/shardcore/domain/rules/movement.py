"""The rules of operators that move elements: views, pieces, joins, reshapes."""

from collections.abc import Sequence
from itertools import pairwise
from math import gcd, prod

import attrs

from shardcore.domain.rules.rule import OperatorRule, Shape, letters, rule_of


def dims_moved(ndim: int, dims: Sequence[int | None], results: int = 1) -> OperatorRule:
    """The results have the dims of the operand in another order, some less, some new.

    Args:
        ndim: The dims of the operand.
        dims: For each dim of a result, that of the operand; None for one that is new or not
            like it.
        results: How many results there are.

    Example:
        >>> str(dims_moved(3, (2, None, 0)))
        'a - c -> c - a'
    """
    given = [name if dim in dims else "-" for dim, name in enumerate(letters(ndim))]
    taken = ["-" if dim is None else given[dim] for dim in dims]
    return rule_of([given], [taken] * results)


def pieces(ndim: int, dim: int, count: int, taken: Sequence[int]) -> OperatorRule:
    """Pieces along `dim`: it has `count` stretches of one size, and a result some of them.

    Args:
        ndim: The dims of the operand.
        dim: The one that is cut into pieces.
        count: How many stretches it has.
        taken: How many of them each result has.

    Example:
        >>> str(pieces(2, dim=1, count=4, taken=(1, 3)))
        'a 4*b -> a b, a 3*b'
    """
    return rule_of(
        [_with_stretches(ndim, dim, count)], [_with_stretches(ndim, dim, each) for each in taken]
    )


def of_pieces(ndim: int, dim: int, count: int, given: Sequence[int]) -> OperatorRule:
    """A tensor with `count` stretches of one size along `dim`: the operands have some of them.

    Example:
        >>> str(of_pieces(2, dim=0, count=3, given=(1, 2))), str(of_pieces(1, 0, 2, given=(1,)))
        ('a b, 2*a b -> 3*a b', 'a -> 2*a')
    """
    return rule_of(
        [_with_stretches(ndim, dim, each) for each in given], [_with_stretches(ndim, dim, count)]
    )


def _with_stretches(ndim: int, dim: int, count: int) -> list[str]:
    return [_dim(count if each == dim else 1, 1, name) for each, name in enumerate(letters(ndim))]


def stacked(ndim: int, dim: int, count: int) -> OperatorRule:
    """Tensors one after the other along `dim`, which is a new dim.

    Example:
        >>> str(stacked(1, 0, 2))
        'a, a -> - a'
    """
    dims = letters(ndim)
    return rule_of([dims] * count, [[*dims[:dim], "-", *dims[dim:]]])


def repeated(ndim: int, repeats: Sequence[int]) -> OperatorRule:
    """A tensor repeated along its dims: a stretch of the result is all of a dim.

    Args:
        ndim: The dims of the operand.
        repeats: How often each dim of the result repeats that of the operand; the first ones may
            be new.

    Example:
        >>> str(repeated(2, (5, 1, 3)))
        'a b -> - a 3*b'
    """
    dims, new = letters(ndim), len(repeats) - ndim
    found = [_dim(count, 1, name) for count, name in zip(repeats[new:], dims, strict=True)]
    return rule_of([dims], [["-"] * new + found])


@attrs.frozen
class Reshape:
    """A reshape: which dims of the operand and of the result are split together.

    Args:
        rule: Its rule.
        pairs: For each such pair the dim of the operand, that of the result, and their sizes.
    """

    rule: OperatorRule
    pairs: tuple[tuple[int, int, int, int], ...]

    def local_shape(self, shape: Shape, part: Shape) -> Shape:
        """The shape of the result's part, for a result of `shape` and an operand's `part`."""
        sizes = list(shape)
        for before, after, size, new in self.pairs:
            sizes[after] = part[before] * new // size
        return tuple(sizes)


def reshape(source: Shape, target: Shape, split: tuple[tuple[int, int], ...] = ()) -> Reshape:
    """Dims are joined and taken apart. Of joined dims one can be split.

    Where the sizes of both sides differ, blocks of them are split, which hold the same elements.
    A dim that is split behind others that it is joined to is split within stretches.

    Args:
        source: The shape of the operand.
        target: The shape of the result.
        split: The dims of the operand that are split, each with the number of its stretches. Of
            dims that are joined the first one is taken where none is split.

    Example:
        >>> str(reshape((8, 6, 5), (48, 5)).rule), str(reshape((48, 5), (2, 24, 5)).rule)
        ('a - c -> 6a c', '24a b -> a - b')
        >>> str(reshape((4, 6), (24,), ((1, 1),)).rule), str(reshape((24,), (4, 6), ((0, 4),)).rule)
        ('- b -> 4*b', '4*a -> - a')
    """
    before, after, names = ["-"] * len(source), ["-"] * len(target), letters(len(source))
    pairs: list[tuple[int, int, int, int]] = []
    counts = dict(split)
    for dims, others in _groups(source, target):
        first = next((dim for dim in dims if dim in counts), dims[0])
        count = counts.get(first, 1)
        joined = prod(source[dims[0] : first]) * count  # the stretches in all
        for other in reversed(others):
            left, rest = divmod(joined, prod(target[others[0] : other]))
            if rest or target[other] % left or source[first] % count:
                continue
            steps = gcd(source[first] // count, target[other] // left)
            if steps > 1:
                before[first] = _dim(count, source[first] // count // steps, names[first])
                after[other] = _dim(left, target[other] // left // steps, names[first])
                pairs.append((first, other, source[first], target[other]))
                break
    return Reshape(rule_of([before], [after]), tuple(pairs))


def _dim(count: int, block: int, name: str) -> str:
    stretches = "" if count == 1 else f"{count}*"
    return f"{stretches}{'' if block == 1 else block}{name}"


def _groups(source: Shape, target: Shape) -> list[tuple[range, range]]:
    """The dims on each side of every least group of dims that have the same elements."""
    if 0 in source:
        return []
    before, after = _ends(source), _ends(target)
    common = sorted(before.keys() & after.keys())
    return [
        (range(before[start], before[end]), range(after[start], after[end]))
        for start, end in pairwise(common)
    ]


def _ends(shape: Shape) -> dict[int, int]:
    """By the product of the dims before it, the number of each dim; the last of equal ones."""
    return {prod(shape[:dim]): dim for dim in range(len(shape) + 1)}
