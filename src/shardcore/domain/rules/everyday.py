"""The rules of everyday operators: element by element, along some dims, reductions, norms."""

from collections.abc import Sequence

from shardcore.domain.placements import ReduceOp
from shardcore.domain.rules.rule import OperatorRule, Shape, letters, rule, rule_of


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
    dims = list(zip(letters(ndim), sizes, strict=True))
    operands = [
        [
            name if size == full else "-"
            for (name, full), size in zip(dims[ndim - len(shape) :], shape, strict=True)
        ]
        for shape in shapes
    ]
    return rule_of(operands, [letters(ndim)] * results)


def along(ndim: int, whole: frozenset[int], operands: int = 1, results: int = 1) -> OperatorRule:
    """What works along the dims in `whole` only: pads; pools, along those of a plane; along none.

    Example:
        >>> str(along(3, frozenset({1})))
        'a - c -> a - c'
    """
    dims = ["-" if dim in whole else name for dim, name in enumerate(letters(ndim))]
    return rule_of([dims] * operands, [dims] * results)


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
    given = " ".join("-" if dim in dims and op is None else name for dim, name in names) or "()"
    left = " ".join("-" if dim in dims else name for dim, name in names if keep or dim not in dims)
    return rule(f"{given} -> {', '.join([left or '()'] * results)}", op=op or "sum")


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
