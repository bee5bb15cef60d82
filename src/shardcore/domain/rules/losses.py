"""Rules of losses that look up the class of each sample.

If the classes are split, each rank looks up its own. An operand numbers the classes and is split as
they are. The losses are partial then, and no class is moved. docs/reference/operators.md lists the
rules.
"""

from shardcore.domain.rules.rule import OperatorRule, letters, rule


def nll_loss(ndim: int, weight: bool, reduced: bool, split: bool = False) -> OperatorRule:
    """Returns the rule of the loss of each sample, or of their sum, and of the sum of the weights.

    Args:
        ndim: The number of dims of the input: classes alone, or samples, classes and further dims.
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
    inputs, target, classes = _terms(ndim, weight, split)
    counted = (1, 3 if split else 2) if weight else (1,)
    loss = "()" if reduced else target
    return rule(f"{inputs}, {target}{classes} -> {loss}, ()", of=((), counted))


def nll_loss_backward(ndim: int, weight: bool, reduced: bool, split: bool = False) -> OperatorRule:
    """Returns the rule of the gradient of the input.

    Example:
        >>> str(nll_loss_backward(2, weight=False, reduced=True))
        '(), a -, a, () -> a -'
        >>> str(nll_loss_backward(2, weight=False, reduced=True, split=True))
        '(), a b, a, (), b -> a b'
    """
    inputs, target, classes = _terms(ndim, weight, split)
    loss = "()" if reduced else target
    return rule(f"{loss}, {inputs}, {target}, (){classes} -> {inputs}", like=(1,))


def _terms(ndim: int, weight: bool, split: bool) -> tuple[str, str, str]:
    """Returns the input, with "-" for classes that are not split, the target, and the rest.

    The rest has an element for each class: their numbers, if they are split, and weights.
    """
    classes = 0 if ndim == 1 else 1
    dims = letters(ndim)
    rest = " ".join(dims[:classes] + dims[classes + 1 :]) or "()"
    dims[classes] = dims[classes] if split else "-"
    numbers = ", b" if split else ""
    return " ".join(dims), rest, f"{numbers}, {dims[classes]}" if weight else numbers
