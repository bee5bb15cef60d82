"""Rules of operators that move elements: permute, stack, split, cat, repeat, reshape."""

from collections.abc import Sequence
from itertools import pairwise
from math import gcd, prod

from shardcore.domain.rules.rule import Dim, OperatorRule, Shape, letters, rule_of


def permute(
    ndim: int, dims: Sequence[int | None], results: int = 1, operands: int = 1
) -> OperatorRule:
    """Returns the rule of results that have the dims of the operands in another order.

    `dims` has, for each dim of a result, that of the operand; None for a new or a changed dim.

    Example:
        >>> str(permute(3, (2, None, 0)))
        'a - c -> c - a'
    """
    given = [name if dim in dims else "-" for dim, name in enumerate(letters(ndim))]
    taken = ["-" if dim is None else given[dim] for dim in dims]
    return rule_of([given] * operands, [taken] * results)


def segmented(ndim: int, dim: int, operands: Sequence[int], results: Sequence[int]) -> OperatorRule:
    """Returns the rule of `split` and `cat`, which move segments of one size along `dim`.

    `operands` and `results` have the number of segments of each.

    Example:
        >>> str(segmented(2, dim=1, operands=(4,), results=(1, 3)))
        'a 4*b -> a b, a 3*b'
        >>> str(segmented(2, dim=0, operands=(1, 2), results=(3,)))
        'a b, 2*a b -> 3*a b'
    """

    def dims(count: int) -> list[str]:
        names = letters(ndim)
        names[dim] = str(Dim(names[dim], count=count))
        return names

    return rule_of(map(dims, operands), map(dims, results))


def repeat(ndim: int, repeats: Sequence[int]) -> OperatorRule:
    """Returns the rule of `repeat`: each repetition of a dim is a segment of the result.

    Example:
        >>> str(repeat(2, (5, 1, 3)))
        'a b -> - a 3*b'
    """
    dims, new = letters(ndim), len(repeats) - ndim
    found = [str(Dim(name, count=count)) for count, name in zip(repeats[new:], dims, strict=True)]
    return rule_of([dims], [["-"] * new + found])


def reshape(source: Shape, target: Shape, split: tuple[tuple[int, int], ...] = ()) -> OperatorRule:
    """Returns the rule of a reshape, which flattens and unflattens groups of dims.

    One dim of a flattened group can be split. If the sizes of both sides differ, the split is in
    blocks that hold the same elements. A dim that is split behind other dims of its group is split
    within segments. `split` has the split dims of the operand, each with the number of its
    segments. In a group without a split dim, the first one is used.

    Example:
        >>> str(reshape((8, 6, 5), (48, 5))), str(reshape((48, 5), (2, 24, 5)))
        ('a - c -> 6a c', '24a b -> a - b')
        >>> str(reshape((4, 6), (24,), ((1, 1),))), str(reshape((24,), (4, 6), ((0, 4),)))
        ('- b -> 4*b', '4*a -> - a')
    """
    before, after, names = ["-"] * len(source), ["-"] * len(target), letters(len(source))
    counts = dict(split)
    for dims, others in _groups(source, target):
        first = next((dim for dim in dims if dim in counts), dims[0])
        count = counts.get(first, 1)
        joined = prod(source[dims[0] : first]) * count  # the segments in all
        for other in reversed(others):
            left, rest = divmod(joined, prod(target[others[0] : other]))
            if rest or target[other] % left or source[first] % count:
                continue
            steps = gcd(source[first] // count, target[other] // left)
            if steps > 1:
                before[first] = str(Dim(names[first], source[first] // count // steps, count))
                after[other] = str(Dim(names[first], target[other] // left // steps, left))
                break
    return rule_of([before], [after])


def _groups(source: Shape, target: Shape) -> list[tuple[range, range]]:
    """Returns, for each smallest group of dims with the same elements, the dims on both sides."""
    if 0 in source:
        return []
    before, after = _ends(source), _ends(target)
    common = sorted(before.keys() & after.keys())
    return [
        (range(before[start], before[end]), range(after[start], after[end]))
        for start, end in pairwise(common)
    ]


def _ends(shape: Shape) -> dict[int, int]:
    """Returns each dim by the product of the dims before it; the last of equal ones."""
    return {prod(shape[:dim]): dim for dim in range(len(shape) + 1)}
