"""Rules of operators that look elements up: indexing, embeddings, searches, losses of classes.

The first line of each function says what the operator does whose rule it builds.

If the classes of a loss are sharded, each rank looks up its own. An operand numbers the classes and
is sharded as they are. The losses are partial then, and no class is moved.
docs/reference/operators.md lists the rules.
"""

from shardcore.domain.engine.rules.basic import along
from shardcore.domain.engine.rules.rule import OperatorRule, Shape, letters, rule, rule_of


def index(ndim: int, first: int, indexed: int, index_dims: int) -> OperatorRule:
    """Indexes the `indexed` dims from `first` on by indices of `index_dims` dims.

    Example:
        >>> str(index(4, first=1, indexed=2, index_dims=1))
        'a - - d, i0, i0 -> a i0 d'
    """
    names = letters(ndim)
    before, after = names[:first], names[first + indexed :]
    dims = [f"i{dim}" for dim in range(index_dims)]
    return rule_of(
        [[*before, *["-"] * indexed, *after], *[dims] * indexed], [[*before, *dims, *after]]
    )


def index_put(ndim: int, indexed: int, accumulates: bool) -> OperatorRule:
    """Writes rows by an index of the first `indexed` dims.

    If it accumulates, the values may be sharded: each rank adds its own. If it overwrites, they may
    not, since the last of several values stays.

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


def gather(dim: int, *shapes: Shape) -> OperatorRule:
    """Runs `gather(tensor, dim, index)` or `scatter(tensor, dim, index, source)`.

    Example:
        >>> str(gather(1, (4, 5), (4, 2), (4, 2)))
        'a -, a -, a - -> a -'
    """
    sizes = enumerate(zip(*shapes, strict=True))
    apart = frozenset(number for number, given in sizes if number == dim or len(set(given)) > 1)
    return along(len(shapes[0]), apart, operands=len(shapes))


def embedding_of_rows(indices: int) -> OperatorRule:
    """Looks rows up in a table that is sharded by rows, which an operand numbers."""
    dims = " ".join(letters(indices))
    return rule(f"v z, {dims}, v -> {dims} z")


def embedding_backward(indices: int) -> OperatorRule:
    """Adds rows, by their index, to the gradient of an embedding table."""
    dims = " ".join(letters(indices))
    return rule(f"{dims} z, {dims} -> - z")


def searchsorted(ndim: int) -> OperatorRule:
    """Finds the position of each element in a sorted sequence."""
    return rule_of([letters(ndim), ["-"]], [letters(ndim)])


def nll_loss(ndim: int, weight: bool, reduced: bool, sharded: bool = False) -> OperatorRule:
    """Looks up the loss of each sample, or their sum, and sums the weights.

    The input has classes alone, or samples, classes and further dims. `weight` is whether each
    class has one, `reduced` whether the losses are summed, `sharded` whether the classes are
    sharded.

    Example:
        >>> str(nll_loss(2, weight=True, reduced=True))
        'a -, a, - -> (), ()'
        >>> str(nll_loss(4, weight=False, reduced=False))
        'a - c d, a c d -> a c d, ()'
        >>> str(nll_loss(2, weight=True, reduced=True, sharded=True))
        'a b, a, b, b -> (), ()'
    """
    inputs, target, classes = _terms(ndim, weight, sharded)
    counted = (1, 3 if sharded else 2) if weight else (1,)
    loss = "()" if reduced else target
    return rule(f"{inputs}, {target}{classes} -> {loss}, ()", of=((), counted))


def nll_loss_backward(
    ndim: int, weight: bool, reduced: bool, sharded: bool = False
) -> OperatorRule:
    """Computes the gradient of the input of `nll_loss`.

    Example:
        >>> str(nll_loss_backward(2, weight=False, reduced=True))
        '(), a -, a, () -> a -'
        >>> str(nll_loss_backward(2, weight=False, reduced=True, sharded=True))
        '(), a b, a, (), b -> a b'
    """
    inputs, target, classes = _terms(ndim, weight, sharded)
    loss = "()" if reduced else target
    return rule(f"{loss}, {inputs}, {target}, (){classes} -> {inputs}", like=(1,))


def _terms(ndim: int, weight: bool, sharded: bool) -> tuple[str, str, str]:
    """Writes the input, with "-" for classes that are not sharded, the target, and the rest.

    The rest has an element for each class: their numbers, if they are sharded, and weights.
    """
    classes = 0 if ndim == 1 else 1
    dims = letters(ndim)
    rest = " ".join(dims[:classes] + dims[classes + 1 :]) or "()"
    dims[classes] = dims[classes] if sharded else "-"
    numbers = ", b" if sharded else ""
    return " ".join(dims), rest, f"{numbers}, {dims[classes]}" if weight else numbers
