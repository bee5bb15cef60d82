"""Rules of elementwise operators, operators along some dims, reductions and layer norms.

The first line of each function says what the operator does whose rule it builds.
"""

from collections.abc import Sequence

from shardcore.domain.engine.rules.rule import OperatorRule, Shape, letters, rule, rule_of
from shardcore.domain.layouts.placements import ReduceOp


def elementwise(shapes: Sequence[Shape], results: int = 1) -> OperatorRule:
    """Computes element by element; dims of size 1 are broadcast, and are not sharded.

    Example:
        >>> str(elementwise(((8, 4), (4,), (8, 1))))
        'a b, b, a - -> a b'
    """
    ndim = max(map(len, shapes), default=0)
    aligned = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    sizes = [max(column, key=lambda size: size != 1) for column in zip(*aligned, strict=True)]
    dims = list(zip(letters(ndim), sizes, strict=True))
    operands = [
        [
            name if size == full else "-"
            for (name, full), size in zip(dims[ndim - len(shape) :], shape, strict=True)
        ]
        for shape in shapes
    ]
    return rule_of(operands, [letters(ndim)] * results)


def product(operands: str, result: str, *shapes: Shape) -> tuple[OperatorRule, Shape]:
    """Multiplies two tensors, and adds others. Returns the shape of the result too.

    `shapes` has the shapes of tensors that are added to the product and broadcast, then of both.

    Example:
        >>> product_rule, shape = product("n k, k m", "n m", (6,), (4, 5), (5, 6))
        >>> str(product_rule), shape
        ('+ m, n k, k m -> n m', (4, 6))
    """
    *added, left, right = shapes
    sizes = dict(zip(operands.replace(",", " ").split(), (*left, *right), strict=True))
    dims = result.split()
    shape = tuple(sizes[dim] for dim in dims)
    terms = [f"+ {_broadcast(added_shape, dims, shape)}, " for added_shape in added]
    return rule(f"{''.join(terms)}{operands} -> {result or '()'}"), shape


def _broadcast(added: Shape, dims: list[str], shape: Shape) -> str:
    new = len(shape) - len(added)
    dims_and_sizes = zip(dims[new:], added, shape[new:], strict=True)
    return " ".join(dim if size == full else "-" for dim, size, full in dims_and_sizes) or "()"


def along(ndim: int, mixed: frozenset[int], operands: int = 1, results: int = 1) -> OperatorRule:
    """Mixes elements along the dims in `mixed` only, as a pad does.

    Example:
        >>> str(along(3, frozenset({1})))
        'a - c -> a - c'
    """
    dims = ["-" if dim in mixed else name for dim, name in enumerate(letters(ndim))]
    return rule_of([dims] * operands, [dims] * results)


def reduction(
    ndim: int, dims: frozenset[int], keep: bool, op: ReduceOp | None = None, results: int = 1
) -> OperatorRule:
    """Reduces along `dims`, which stay with size 1 if `keep`.

    Partial results are reduced by `op`; without it, no reduced dim is sharded.

    Example:
        >>> str(reduction(3, frozenset({0}), keep=True, op="sum"))
        'a b c -> - b c'
        >>> str(reduction(2, frozenset({1}), keep=False))
        'a - -> a'
    """
    names = list(enumerate(letters(ndim)))
    given = " ".join("-" if dim in dims and op is None else name for dim, name in names) or "()"
    left = " ".join("-" if dim in dims else name for dim, name in names if keep or dim not in dims)
    return rule(f"{given} -> {', '.join([left or '()'] * results)}", op=op or "sum")


def layer_norm(leading: int, trailing: int, weights: int) -> OperatorRule:
    """Normalizes over the last `trailing` dims, with `weights` weights.

    Example:
        >>> str(layer_norm(2, 1, 1))
        'a b -, - -> a b -, a b -, a b -'
    """
    inner = ["-"] * trailing
    rows = letters(leading) + inner
    return rule_of([rows, *[inner] * weights], [rows] * 3)


def layer_norm_backward(
    leading: int, trailing: int, weights: int, moments: int = 2
) -> OperatorRule:
    """Takes the gradient, the input, its moments and the weights of `layer_norm`.

    A normalization by one moment has one weight, one by two moments a bias too.

    Example:
        >>> str(layer_norm_backward(1, 1, 2))
        'a -, a -, a -, a -, -, - -> a -, -, -'
        >>> str(layer_norm_backward(1, 1, 1, moments=1))
        'a -, a -, a -, - -> a -, -'
    """
    inner = ["-"] * trailing
    rows = letters(leading) + inner
    operands = [*[rows] * (2 + moments), *[inner] * weights]
    return rule_of(operands, [rows, *[inner] * moments])
