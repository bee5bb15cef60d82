"""The rules of everyday operators: arithmetic, reshapes, reductions, products of matrices.

Each is made for the shapes of a call and kept. `domain.operator_rules_table` has those of layers.
"""

from functools import lru_cache
from itertools import pairwise
from math import gcd, prod

import attrs

from shardcore.domain.operator_rules import Operand, OperatorRule, Result
from shardcore.domain.operator_rules_table import letter

Shape = tuple[int, ...]


@lru_cache(maxsize=4096)
def elementwise(shapes: tuple[Shape, ...], results: int = 1) -> OperatorRule:
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
    operands = [
        Operand(
            f"operand {number}",
            " ".join(
                letter(dim) if size == sizes[dim] else "-"
                for dim, size in enumerate(shape)
                if dim >= ndim - len(shapes[number])
            ),
        )
        for number, shape in enumerate(aligned)
    ]
    dims = " ".join(map(letter, range(ndim)))
    return OperatorRule(
        tuple(operands), tuple(Result(f"result {number}", dims) for number in range(results))
    )


@lru_cache(maxsize=4096)
def dims_moved(ndim: int, dims: tuple[int | None, ...], results: int = 1) -> OperatorRule:
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
    given = " ".join(letter(dim) if dim in dims else "-" for dim in range(ndim))
    taken = " ".join("-" if dim is None else letter(dim) for dim in dims)
    return OperatorRule(
        (Operand("tensor", given),),
        tuple(Result(f"view {number}", taken) for number in range(results)),
    )


@lru_cache
def pieces(ndim: int, dim: int, count: int, taken: tuple[int, ...]) -> OperatorRule:
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
    return OperatorRule(
        (Operand("tensor", _with_stretches(ndim, dim, count)),),
        tuple(
            Result(f"piece {number}", _with_stretches(ndim, dim, each))
            for number, each in enumerate(taken)
        ),
    )


@lru_cache
def of_pieces(ndim: int, dim: int, count: int, given: tuple[int, ...]) -> OperatorRule:
    """A tensor with `count` stretches of one size along `dim`: the operands have some of them.

    Example:
        >>> str(of_pieces(2, dim=0, count=3, given=(1, 2))), str(of_pieces(1, 0, 2, given=(1,)))
        ('a b, 2*a b -> 3*a b', 'a -> 2*a')
    """
    return OperatorRule(
        tuple(
            Operand(f"piece {number}", _with_stretches(ndim, dim, each))
            for number, each in enumerate(given)
        ),
        (Result("result", _with_stretches(ndim, dim, count)),),
    )


def _with_stretches(ndim: int, dim: int, count: int) -> str:
    return " ".join(_dim(count if each == dim else 1, 1, each) for each in range(ndim))


@lru_cache
def repeated(ndim: int, repeats: tuple[int, ...]) -> OperatorRule:
    """A tensor repeated along its dims: a stretch of the result is all of a dim.

    Args:
        ndim: The dims of the operand.
        repeats: How often each dim of the result repeats that of the operand; the first ones may
            be new.

    Example:
        >>> str(repeated(2, (5, 1, 3)))
        'a b -> - a 3*b'
    """
    new = len(repeats) - ndim
    dims = ["-"] * new + [_dim(count, 1, dim) for dim, count in enumerate(repeats[new:])]
    given = " ".join(map(letter, range(ndim)))
    return OperatorRule((Operand("tensor", given),), (Result("repeated", " ".join(dims)),))


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


@lru_cache(maxsize=4096)
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
    before, after = ["-"] * len(source), ["-"] * len(target)
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
                before[first] = _dim(count, source[first] // count // steps, first)
                after[other] = _dim(left, target[other] // left // steps, first)
                pairs.append((first, other, source[first], target[other]))
                break
    rule = OperatorRule((Operand("tensor", " ".join(before)),), (Result("view", " ".join(after)),))
    return Reshape(rule, tuple(pairs))


def _dim(count: int, block: int, dim: int) -> str:
    stretches = "" if count == 1 else f"{count}*"
    return f"{stretches}{'' if block == 1 else block}{letter(dim)}"


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
    ndim: int, dims: frozenset[int], keep: bool, summed: bool, results: int = 1
) -> OperatorRule:
    """A reduction along `dims`.

    Args:
        ndim: The dims of the operand.
        dims: Those that are reduced.
        keep: Whether they stay, with size 1.
        summed: Whether it is a sum, so that parts of it can be summed later.
        results: How many results there are.

    Example:
        >>> str(reduced(3, frozenset({0}), keep=True, summed=True))
        'a b c -> - b c'
        >>> str(reduced(2, frozenset({1}), keep=False, summed=False))
        'a - -> a'
    """
    given = " ".join("-" if dim in dims and not summed else letter(dim) for dim in range(ndim))
    left = " ".join(
        "-" if dim in dims else letter(dim) for dim in range(ndim) if keep or dim not in dims
    )
    return OperatorRule(
        (Operand("tensor", given),),
        tuple(Result(f"result {number}", left) for number in range(results)),
    )


@lru_cache
def product(operands: str, result: str, added: str | None = None) -> OperatorRule:
    """A product of two tensors, and what may be added to it.

    Args:
        operands: The dims of both, as in an einsum: "n k, k m".
        result: The dims of the result.
        added: The dims of what is added.

    Example:
        >>> str(product("n k, k m", "n m", added="m"))
        'n k, k m, + m -> n m'
    """
    left, right = operands.split(",")
    terms = [Operand("left", left), Operand("right", right)]
    if added is not None:
        terms.append(Operand("added", added, added=True))
    return OperatorRule(tuple(terms), (Result("product", result),))


@lru_cache
def joined(ndim: int, dim: int, count: int, new: bool) -> OperatorRule:
    """Tensors one after the other along `dim`, which is a new dim or one of theirs.

    Example:
        >>> str(joined(2, 1, 2, new=False)), str(joined(1, 0, 2, new=True))
        ('a -, a - -> a -', 'a, a -> - a')
    """
    dims = [letter(each) for each in range(ndim)]
    whole = dims.copy()
    if new:
        whole.insert(dim, "-")
    else:
        dims[dim] = whole[dim] = "-"
    return OperatorRule(
        tuple(Operand(f"operand {number}", " ".join(dims)) for number in range(count)),
        (Result("result", " ".join(whole)),),
    )


@lru_cache
def embedding(indices: int) -> OperatorRule:
    """Rows of a table, found by `indices` dims of numbers.

    Example:
        >>> str(embedding(2))
        '- z, a b -> a b z'
    """
    dims = " ".join(map(letter, range(indices)))
    return OperatorRule(
        (Operand("table", "- z"), Operand("indices", dims)), (Result("rows", f"{dims} z"),)
    )


@lru_cache
def embedding_of_rows(indices: int) -> OperatorRule:
    """Rows of a table of which each rank has some; the numbers of its rows tell which.

    Example:
        >>> str(embedding_of_rows(2))
        'v z, a b, v -> a b z'
    """
    dims = " ".join(map(letter, range(indices)))
    return OperatorRule(
        (Operand("table", "v z"), Operand("indices", dims), Operand("numbers", "v")),
        (Result("rows", f"{dims} z"),),
    )


@lru_cache
def embedding_backward(indices: int) -> OperatorRule:
    """The gradient of the table: rows are added where they were found.

    Example:
        >>> str(embedding_backward(2))
        'a b z, a b -> - z'
    """
    dims = " ".join(map(letter, range(indices)))
    return OperatorRule(
        (Operand("gradient", f"{dims} z"), Operand("indices", dims)), (Result("table", "- z"),)
    )


@lru_cache
def layer_norm(leading: int, trailing: int, weights: int) -> OperatorRule:
    """A normalization over the last `trailing` dims, by `weights` tensors of their shape.

    Example:
        >>> str(layer_norm(2, 1, 1))
        'a b -, - -> a b -, a b -, a b -'
    """
    dims = " ".join(map(letter, range(leading)))
    inner = " -" * trailing
    operands = [Operand("input", dims + inner)]
    operands += [Operand(f"weight {number}", inner) for number in range(weights)]
    return OperatorRule(
        tuple(operands),
        tuple(Result(name, dims + inner) for name in ("output", "mean", "deviation")),
    )


@lru_cache
def layer_norm_backward(leading: int, trailing: int, weights: int) -> OperatorRule:
    """The gradients of input, weight and bias.

    Example:
        >>> str(layer_norm_backward(1, 1, 2))
        'a -, a -, a -, a -, -, - -> a -, -, -'
    """
    dims = " ".join(map(letter, range(leading)))
    inner = " -" * trailing
    names = ("gradient", "input", "mean", "deviation")
    operands = [Operand(name, dims + inner) for name in names]
    operands += [Operand(f"weight {number}", inner) for number in range(weights)]
    return OperatorRule(
        tuple(operands),
        (
            Result("of input", dims + inner),
            Result("of weight", inner, of=("gradient", "input")),
            Result("of bias", inner, of=("gradient",)),
        ),
    )


@lru_cache
def placed(ndim: int) -> OperatorRule:
    """The place of each element of a tensor among sorted numbers.

    Example:
        >>> str(placed(2))
        'a b, - -> a b'
    """
    dims = " ".join(map(letter, range(ndim)))
    return OperatorRule(
        (Operand("tensor", dims), Operand("boundaries", "-")), (Result("places", dims),)
    )


@lru_cache
def taken(ndim: int, dim: int) -> OperatorRule:
    """Elements along `dim`, found by a list of numbers.

    Example:
        >>> str(taken(3, 1))
        'a - c, z -> a z c'
    """
    dims = [letter(each) for each in range(ndim)]
    given, found = dims.copy(), dims.copy()
    given[dim], found[dim] = "-", "z"
    return OperatorRule(
        (Operand("tensor", " ".join(given)), Operand("indices", "z")),
        (Result("elements", " ".join(found)),),
    )


@lru_cache(maxsize=4096)
def looked_up(shape: Shape, index: Shape, dim: int) -> OperatorRule:
    """`gather(tensor, dim, index)`: an element along `dim` for each element of the index.

    Example:
        >>> str(looked_up((4, 5), (4, 2), 1))
        'a -, a - -> a -'
    """
    dims = " ".join(
        letter(each) if each != dim and size == index[each] else "-"
        for each, size in enumerate(shape)
    )
    return OperatorRule(
        (Operand("tensor", dims), Operand("index", dims)), (Result("elements", dims),)
    )


@lru_cache(maxsize=4096)
def scattered(shape: Shape, index: Shape, source: Shape | None, dim: int) -> OperatorRule:
    """`scatter(tensor, dim, index, source)`: elements along `dim` that are put where it says.

    Args:
        shape: The shape of the tensor.
        index: That of the index.
        source: That of what is put there; None for a number.
        dim: The dim that the index is of.

    Example:
        >>> str(scattered((4, 5), (4, 2), (4, 2), 1))
        'a -, a -, a - -> a -'
    """
    shapes = [shape, index] if source is None else [shape, index, source]
    dims = " ".join(
        letter(each) if each != dim and len({given[each] for given in shapes}) == 1 else "-"
        for each in range(len(shape))
    )
    names = ("tensor", "index", "source")
    return OperatorRule(
        tuple(Operand(name, dims) for name, _ in zip(names, shapes, strict=False)),
        (Result("tensor", dims),),
    )
