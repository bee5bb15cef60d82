"""The rules of operators that look elements up: by an index, by rows of a table, by their size."""

from shardcore.domain.rules.everyday import along
from shardcore.domain.rules.rule import OperatorRule, Shape, letters, rule, rule_of


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


def embedding_of_rows(indices: int) -> OperatorRule:
    """Rows of a table of which each rank has some; the numbers of its rows tell which."""
    dims = " ".join(letters(indices))
    return rule(f"v z, {dims}, v -> {dims} z")


def embedding_backward(indices: int) -> OperatorRule:
    """The gradient of a table: rows are added where they were found."""
    dims = " ".join(letters(indices))
    return rule(f"{dims} z, {dims} -> - z")


def placed(ndim: int) -> OperatorRule:
    """The place of each element of a tensor among sorted numbers."""
    return rule_of([letters(ndim), ["-"]], [letters(ndim)])
