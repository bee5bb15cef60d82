"""Rules of operators that move elements: permute, stack, split, cat, repeat, reshape.

The first line of each function says what the operator does whose rule it builds.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gcd, prod

import attrs

from shardcore.domain.engine.rules.basic import along
from shardcore.domain.engine.rules.rule import Dim, OperatorRule, Shape, letters, rule_of
from shardcore.domain.layouts.placements import Segments


def permute(
    ndim: int, dims: Sequence[int | None], results: int = 1, operands: int = 1
) -> OperatorRule:
    """Puts the dims of the operands into another order.

    `dims` has, for each dim of a result, that of the operand; None for a new or a changed dim.

    Example:
        >>> str(permute(3, (2, None, 0)))
        'a - c -> c - a'
    """
    operand_dims = [name if dim in dims else "-" for dim, name in enumerate(letters(ndim))]
    result_dims = ["-" if dim is None else operand_dims[dim] for dim in dims]
    return rule_of([operand_dims] * operands, [result_dims] * results)


def source_dims(shape: Shape, sizes: Sequence[int]) -> list[int | None]:
    """Finds, for each dim of a tensor that is expanded to `sizes`, that of the tensor.

    It is None for a new dim and one that repeats; a size of -1 keeps a dim.

    Example:
        >>> source_dims((1, 3), (2, 4, -1))
        [None, None, 1]
    """
    new = len(sizes) - len(shape)
    return [
        dim - new if dim >= new and size in (-1, shape[dim - new]) else None
        for dim, size in enumerate(sizes)
    ]


def segmented(ndim: int, dim: int, operands: Sequence[int], results: Sequence[int]) -> OperatorRule:
    """Moves segments of one size along `dim`, as `split` and `cat` do.

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


def cut(ndim: int, dim: int, sizes: Sequence[int]) -> OperatorRule:
    """Cuts `dim` into pieces of these sizes, as `split` does.

    Example:
        >>> str(cut(2, dim=1, sizes=(2, 6))), str(cut(2, dim=1, sizes=(2, 0)))
        ('a 4*b -> a b, a 3*b', 'a - -> a -, a -')
    """
    if 0 in sizes:
        return along(ndim, frozenset({dim}), results=len(sizes))
    return segmented(ndim, dim, (sum(sizes) // gcd(*sizes),), _segments(sizes))


def concatenation(ndim: int, dim: int, sizes: Sequence[int]) -> OperatorRule:
    """Joins pieces of these sizes along `dim`, as `cat` does.

    Example:
        >>> str(concatenation(2, dim=0, sizes=(3, 6)))
        'a b, 2*a b -> 3*a b'
    """
    if 0 in sizes:
        return along(ndim, frozenset({dim}), operands=len(sizes))
    return segmented(ndim, dim, _segments(sizes), (sum(sizes) // gcd(*sizes),))


def _segments(sizes: Sequence[int]) -> list[int]:
    """Counts the segments, as large as possible, in pieces of these sizes."""
    return [size // gcd(*sizes) for size in sizes]


def repeat(ndim: int, repeats: Sequence[int]) -> OperatorRule:
    """Repeats dims: each repetition is a segment of the result.

    Example:
        >>> str(repeat(2, (5, 1, 3)))
        'a b -> - a 3*b'
    """
    dims, new = letters(ndim), len(repeats) - ndim
    repeated = [
        str(Dim(name, count=count)) for count, name in zip(repeats[new:], dims, strict=True)
    ]
    return rule_of([dims], [["-"] * new + repeated])


def reshape(
    source: Shape, target: Shape, sharded: tuple[tuple[int, Segments], ...] = ()
) -> OperatorRule:
    """Flattens and unflattens groups of dims (ADR 50).

    Two dims of a flattened group can be sharded. If the sizes of both sides differ, the sharding is
    in blocks that hold the same elements. A dim that is sharded behind other dims of its group is
    sharded within segments; if one of these is sharded too, the segments are the steps of its
    factor. `sharded` has the sharded dims of the operand with their segments. In a group without a
    sharded dim, the first one is used.

    Example:
        >>> str(reshape((8, 6, 5), (48, 5))), str(reshape((48, 5), (2, 24, 5)))
        ('a - c -> 6a c', '24a b -> a - b')
        >>> str(reshape((4, 6), (24,), ((1, Segments(1)),)))
        '- b -> 4*b'
        >>> str(reshape((24,), (4, 6), ((0, Segments(4)),)))
        '4*a -> - a'
        >>> str(reshape((4, 6), (24,), ((0, Segments(1)), (1, Segments(1)))))
        'a b -> a*b'
        >>> str(reshape((24,), (4, 6), ((0, Segments(4, outer=1)),)))
        'b*a -> b a'
    """
    before: list[tuple[_Steps, ...]] = [()] * len(source)
    after: list[tuple[_Steps, ...]] = [()] * len(target)
    names, of_dims = letters(2 * len(source)), dict(sharded)
    for dims, others in _groups(source, target):
        for dim in [candidate for candidate in dims if candidate in of_dims] or dims[:1]:
            segments, left = of_dims.get(dim, Segments(1)), prod(source[dims[0] : dim])
            parts = [_Steps(names[dim], segments.count, source[dim] // segments.count)]
            if segments.outer:
                parts.insert(0, _Steps(names[len(source) + dim], 1, segments.count))
            for part in parts:
                for other, target_steps in _dims_with_steps(part, left, target, others):
                    source_steps = attrs.evolve(part, steps=target_steps.steps)
                    both = (*before[dim], source_steps), (*after[other], target_steps)
                    if merged := _merge_steps(source[dim], target[other], *both):
                        before[dim], after[other] = merged
    terms = (
        [str(_dim(size, steps)) for size, steps in zip(shape, of_shape, strict=True)]
        for shape, of_shape in ((source, before), (target, after))
    )
    return rule_of(*([term] for term in terms))


@attrs.frozen
class _Steps:
    """The steps of a factor in a dim: so many in each of `count` segments of the dim."""

    factor: str
    count: int
    steps: int


def _dims_with_steps(
    part: _Steps, before: int, target: Shape, others: range
) -> Iterator[tuple[int, _Steps]]:
    """Yields the last dim of a group that has steps of `part`, with these, if there is one.

    The operand has `part` in a dim behind `before` elements of the group.
    """
    for other in reversed(others):
        count, rest = divmod(before * part.count, prod(target[others[0] : other]))
        if not rest and not target[other] % count:
            steps = gcd(part.steps, target[other] // count)
            if steps > 1:
                yield other, _Steps(part.factor, count, steps)
                return


def _merge_steps(
    size: int, other_size: int, source_steps: tuple[_Steps, ...], target_steps: tuple[_Steps, ...]
) -> tuple[tuple[_Steps, ...], tuple[_Steps, ...]] | None:
    """Merges the steps of a dim before and after; None if a dim cannot have them.

    Two factors that are one behind the other on both sides become one.
    """
    own, other = _dim(size, source_steps), _dim(other_size, target_steps)
    if own is None or other is None:
        return None
    if own.outer is None or own.outer != other.outer:
        return source_steps, target_steps
    if (own.count, other.count) != (1, 1):
        return None
    as_one = (_Steps(source_steps[1].factor, 1, source_steps[0].steps * source_steps[1].steps),)
    return as_one, as_one


def _dim(size: int, steps: tuple[_Steps, ...]) -> Dim | None:
    """Finds a dim of `size` elements that has these steps; None if no dim has."""
    if not steps:
        return Dim()
    *outer, last = steps
    block = size // last.count // last.steps
    if not outer:
        return Dim(last.factor, block, last.count)
    count, rest = divmod(last.count, outer[0].steps)
    if rest or len(outer) > 1 or outer[0].count > 1:
        return None
    return Dim(last.factor, block, count, outer[0].factor)


def _groups(source: Shape, target: Shape) -> list[tuple[range, range]]:
    """Pairs the dims on both sides of each smallest group with the same elements."""
    if 0 in source:
        return []
    before, after = _ends(source), _ends(target)
    common = sorted(before.keys() & after.keys())
    return [
        (range(before[start], before[end]), range(after[start], after[end]))
        for start, end in pairwise(common)
    ]


def _ends(shape: Shape) -> dict[int, int]:
    """Looks dims up by the product of the dims before them; of equal ones the last."""
    return {prod(shape[:dim]): dim for dim in range(len(shape) + 1)}
