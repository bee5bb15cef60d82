"""The rules of everyday operators: arithmetic, reshapes, reductions, look-ups, norms.

Each is made for the shapes of a call. `domain.operator_rules_table` has those of layers.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import gcd, prod

import attrs

from shardcore.domain.operator_rules import (
    Operand,
    OperatorRule,
    Result,
    letters,
    rule,
    rule_of,
)
from shardcore.domain.placements import ReduceOp

Shape = tuple[int, ...]


def elementwise(shapes: Sequence[Shape], results: int = 1) -> OperatorRule:
    """Each element of the results is made of one element of each operand; sizes of 1 are broadcast.

    Args:
        shapes: The shapes of the operands.
        results: How many results there are, all of one shape.

    Example:
        >>> str(elementwise(((8, 4), (4,), (8, 1))))
        'a b, b, a - -> a b'
    """
    ndim = max(map(len, shapes), default=0)
    aligned = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    sizes = [max(column, key=lambda size: size != 1) for column in zip(*aligned, strict=True)]
    dims = letters(ndim)
    operands = [
        [
            dim if size == full else "-"
            for dim, size, full in zip(
                dims[-len(shape) :], shape, sizes[-len(shape) :], strict=True
            )
        ]
        if shape
        else []
        for shape in shapes
    ]
    return rule_of(operands, [dims] * results)


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


def along(ndim: int, whole: frozenset[int], operands: int = 1, results: int = 1) -> OperatorRule:
    """What works along the dims in `whole` only: pads; pools, along those of a plane; along none.

    Example:
        >>> str(along(3, frozenset({1})))
        'a - c -> a - c'
    """
    dims = ["-" if dim in whole else name for dim, name in enumerate(letters(ndim))]
    return rule_of([dims] * operands, [dims] * results)


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


@lru_cache(maxsize=4096)
def reduced(
    ndim: int, dims: frozenset[int], keep: bool, op: ReduceOp | None = None, results: int = 1
) -> OperatorRule:
    """A reduction along `dims`.

    Args:
        ndim: The dims of the operand.
        dims: Those that are reduced.
        keep: Whether they stay, with size 1.
        op: How the reductions of parts are reduced; None where they cannot be.
        results: How many results there are.

    Example:
        >>> str(reduced(3, frozenset({0}), keep=True, op="sum"))
        'a b c -> - b c'
        >>> str(reduced(2, frozenset({1}), keep=False))
        'a - -> a'
    """
    names = list(enumerate(letters(ndim)))
    given = " ".join("-" if dim in dims and op is None else name for dim, name in names)
    left = " ".join("-" if dim in dims else name for dim, name in names if keep or dim not in dims)
    found = (Result(f"result {number}", left, op=op or "sum") for number in range(results))
    return OperatorRule((Operand("tensor", given),), tuple(found))


def embedding_of_rows(indices: int) -> OperatorRule:
    """Rows of a table of which each rank has some; the numbers of its rows tell which.

    Example:
        >>> str(embedding_of_rows(2))
        'v z, a b, v -> a b z'
    """
    dims = letters(indices)
    return rule_of([["v", "z"], dims, ["v"]], [[*dims, "z"]])


def embedding_backward(indices: int) -> OperatorRule:
    """The gradient of a table: rows are added where they were found.

    Example:
        >>> str(embedding_backward(2))
        'a b z, a b -> - z'
    """
    dims = letters(indices)
    return rule_of([[*dims, "z"], dims], [["-", "z"]])


def layer_norm(leading: int, trailing: int, weights: int) -> OperatorRule:
    """A normalization over the last `trailing` dims, by `weights` tensors of their shape.

    Example:
        >>> str(layer_norm(2, 1, 1))
        'a b -, - -> a b -, a b -, a b -'
    """
    inner = ["-"] * trailing
    rows = letters(leading) + inner
    return rule_of([rows, *[inner] * weights], [rows] * 3)


def layer_norm_backward(leading: int, trailing: int, weights: int) -> OperatorRule:
    """The gradients of input, weight and bias, of the gradient, the input, and its two moments.

    Example:
        >>> str(layer_norm_backward(1, 1, 2))
        'a -, a -, a -, a -, -, - -> a -, -, -'
    """
    inner = ["-"] * trailing
    rows = letters(leading) + inner
    return rule_of([*[rows] * 4, *[inner] * weights], [rows, inner, inner])


def placed(ndim: int) -> OperatorRule:
    """The place of each element of a tensor among sorted numbers.

    Example:
        >>> str(placed(2))
        'a b, - -> a b'
    """
    return rule_of([letters(ndim), ["-"]], [letters(ndim)])


def index(ndim: int, first: int, indexed: int, found: int) -> OperatorRule:
    """Elements looked up in adjacent dims of a tensor, by an index of one shape for each of them.

    Args:
        ndim: The dims of the tensor.
        first: The first dim that has an index.
        indexed: How many dims have one.
        found: How many dims an index has.

    Example:
        >>> str(index(4, first=1, indexed=2, found=1))
        'a - - d, i0, i0 -> a i0 d'
    """
    names = letters(ndim)
    before, after = names[:first], names[first + indexed :]
    dims = [f"i{dim}" for dim in range(found)]
    return rule_of(
        [[*before, *["-"] * indexed, *after], *[dims] * indexed], [[*before, *dims, *after]]
    )


def index_put(ndim: int, indexed: int, accumulates: bool) -> OperatorRule:
    """Values put at rows of a tensor that are looked up in its first `indexed` dims.

    What is added up may be split by the values: each rank adds its own. What is overwritten may
    not, since the last of several values stays.

    Args:
        ndim: The dims of the tensor.
        indexed: How many of them have an index, one row of numbers each.
        accumulates: Whether values are added to what is there.

    Example:
        >>> str(index_put(3, indexed=2, accumulates=True))
        '+ - - c, n, n, n c -> - - c'
        >>> str(index_put(2, indexed=1, accumulates=False))
        '- b, -, - b -> - b'
    """
    count, rest = "n" if accumulates else "-", " ".join(letters(ndim)[indexed:])
    tensor = "- " * indexed + rest
    rows = f"{count}, " * indexed
    return rule(f"{'+ ' * accumulates}{tensor}, {rows}{count} {rest} -> {tensor}")


def looked_up(dim: int, *shapes: Shape) -> OperatorRule:
    """`gather(tensor, dim, index)`, and `scatter(tensor, dim, index, source)`.

    Args:
        dim: The dim that the index is of.
        *shapes: The shapes of the tensor, of its index, and of what is put there.

    Example:
        >>> str(looked_up(1, (4, 5), (4, 2), (4, 2)))
        'a -, a -, a - -> a -'
    """
    sizes = enumerate(zip(*shapes, strict=True))
    apart = frozenset(each for each, given in sizes if each == dim or len(set(given)) > 1)
    return along(len(shapes[0]), apart, operands=len(shapes))
