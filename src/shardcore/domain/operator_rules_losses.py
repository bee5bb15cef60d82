"""The rules of losses that look up the class of each sample.

Each is made for the shapes of a call and kept. docs/operators.md lists the rules.
"""

from functools import lru_cache

from shardcore.domain.operator_rules import Operand, OperatorRule, Result
from shardcore.domain.operator_rules_table import letter


@lru_cache
def nll_loss(ndim: int, weight: bool, reduced: bool) -> OperatorRule:
    """The loss of each sample, or their sum; and the sum of the weights of the samples.

    Args:
        ndim: The dims of the input: classes alone, or samples, classes and whatever else.
        weight: Whether each class has a weight.
        reduced: Whether the losses are summed.

    Example:
        >>> str(nll_loss(2, weight=True, reduced=True))
        'a -, a, - -> (), ()'
        >>> str(nll_loss(4, weight=False, reduced=False))
        'a - c d, a c d -> a c d, ()'
    """
    inputs, target = _dims(ndim)
    return OperatorRule(
        (Operand("input", inputs), Operand("target", target), *_weight(weight)),
        (Result("loss", "" if reduced else target), Result("total weight", "")),
    )


@lru_cache
def nll_loss_backward(ndim: int, weight: bool, reduced: bool) -> OperatorRule:
    """The gradient of the input.

    Example:
        >>> str(nll_loss_backward(2, weight=False, reduced=True))
        '(), a -, a, () -> a -'
    """
    inputs, target = _dims(ndim)
    return OperatorRule(
        (
            Operand("gradient", "" if reduced else target),
            Operand("input", inputs),
            Operand("target", target),
            *_weight(weight),
            Operand("total weight", ""),
        ),
        (Result("of input", inputs, like="input"),),
    )


def _dims(ndim: int) -> tuple[str, str]:
    """Those of the input, whose classes are looked up and not split, and of the target."""
    classes = 0 if ndim == 1 else 1
    dims = [letter(dim) for dim in range(ndim)]
    rest = " ".join(dims[:classes] + dims[classes + 1 :])
    dims[classes] = "-"
    return " ".join(dims), rest


def _weight(weight: bool) -> tuple[Operand, ...]:
    return (Operand("weight", "-"),) if weight else ()
