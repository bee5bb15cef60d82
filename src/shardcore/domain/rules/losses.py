"""The rules of losses that look up the class of each sample.

Where the classes are split, each rank looks for those that it has: an operand that counts them,
split as they are, tells which these are. So the losses are pending, and the classes stay where
they are. Each rule is made for the shapes of a call and kept. docs/operators.md lists them.
"""

from functools import lru_cache

from shardcore.domain.rules.rule import Operand, OperatorRule, Result, letters


@lru_cache
def nll_loss(ndim: int, weight: bool, reduced: bool, split: bool = False) -> OperatorRule:
    """The loss of each sample, or their sum; and the sum of the weights of the samples.

    Args:
        ndim: The dims of the input: classes alone, or samples, classes and whatever else.
        weight: Whether each class has a weight.
        reduced: Whether the losses are summed.
        split: Whether the classes are split.

    Example:
        >>> str(nll_loss(2, weight=True, reduced=True))
        'a -, a, - -> (), ()'
        >>> str(nll_loss(4, weight=False, reduced=False))
        'a - c d, a c d -> a c d, ()'
        >>> str(nll_loss(2, weight=True, reduced=True, split=True))
        'a b, a, b, b -> (), ()'
    """
    inputs, target = _dims(ndim, split)
    counted = ("target", "weight") if weight else ("target",)
    return OperatorRule(
        (Operand("input", inputs), Operand("target", target), *_of_classes(weight, split)),
        (Result("loss", "" if reduced else target), Result("total weight", "", of=counted)),
    )


@lru_cache
def nll_loss_backward(ndim: int, weight: bool, reduced: bool, split: bool = False) -> OperatorRule:
    """The gradient of the input.

    Example:
        >>> str(nll_loss_backward(2, weight=False, reduced=True))
        '(), a -, a, () -> a -'
        >>> str(nll_loss_backward(2, weight=False, reduced=True, split=True))
        '(), a b, a, (), b -> a b'
    """
    inputs, target = _dims(ndim, split)
    return OperatorRule(
        (
            Operand("gradient", "" if reduced else target),
            Operand("input", inputs),
            Operand("target", target),
            Operand("total weight", ""),
            *_of_classes(weight, split),
        ),
        (Result("of input", inputs, like="input"),),
    )


def _dims(ndim: int, split: bool) -> tuple[str, str]:
    """Those of the input, "-" for classes that are not split, and those of the target."""
    classes = 0 if ndim == 1 else 1
    dims = letters(ndim)
    rest = " ".join(dims[:classes] + dims[classes + 1 :])
    dims[classes] = dims[classes] if split else "-"
    return " ".join(dims), rest


def _of_classes(weight: bool, split: bool) -> list[Operand]:
    """What has an element for each class: their numbers, where they are split, and weights."""
    numbers = [Operand("numbers", "b")] if split else []
    return numbers + ([Operand("weight", "b" if split else "-")] if weight else [])
