"""The rules of losses that look up the class of each sample, where the classes are split.

Each rank looks for the classes that it has: an operand that counts them, split as they are, tells
which these are. So the losses are pending, and the classes stay where they lie.
"""

from functools import lru_cache

from shardcore.domain.operator_rules import Operand, OperatorRule, Result
from shardcore.domain.operator_rules_table import letter


@lru_cache
def nll_loss_of_classes(ndim: int, weight: bool, reduced: bool) -> OperatorRule:
    """The loss of each sample, or their sum; and the sum of the weights of the samples.

    Args:
        ndim: The dims of the input: samples, classes and whatever else.
        weight: Whether each class has a weight.
        reduced: Whether the losses are summed.

    Example:
        >>> str(nll_loss_of_classes(2, weight=True, reduced=True))
        'a b, a, b, b -> (), ()'
        >>> str(nll_loss_of_classes(3, weight=False, reduced=False))
        'a b c, a c, b -> a c, ()'
    """
    inputs, target = _dims(ndim)
    counted = ("target", "weight") if weight else ("target",)
    return OperatorRule(
        (
            Operand("input", inputs),
            Operand("target", target),
            Operand("numbers", "b"),
            *_weight(weight),
        ),
        (Result("loss", "" if reduced else target), Result("total weight", "", of=counted)),
    )


@lru_cache
def nll_loss_of_classes_backward(ndim: int, weight: bool, reduced: bool) -> OperatorRule:
    """The gradient of the input.

    Example:
        >>> str(nll_loss_of_classes_backward(2, weight=False, reduced=True))
        '(), a b, a, (), b -> a b'
    """
    inputs, target = _dims(ndim)
    return OperatorRule(
        (
            Operand("gradient", "" if reduced else target),
            Operand("input", inputs),
            Operand("target", target),
            Operand("total weight", ""),
            Operand("numbers", "b"),
            *_weight(weight),
        ),
        (Result("of input", inputs, like="input"),),
    )


def _dims(ndim: int) -> tuple[str, str]:
    """Those of the input, "b" for its classes, and those of the target."""
    dims = [letter(dim) for dim in range(ndim)]
    return " ".join(dims), " ".join(dims[:1] + dims[2:])


def _weight(weight: bool) -> tuple[Operand, ...]:
    return (Operand("weight", "b"),) if weight else ()
