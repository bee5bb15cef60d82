"""The rules of operators: made for the numbers of a call, such as how many dims there are.

Each is made once and kept, as an operator is called often. Adapters name the operators of their
library that a rule is for; docs/operators.md lists the rules.
"""

from functools import lru_cache

import attrs

from shardcore.domain.operator_rules import Operand, OperatorRule, Result


@attrs.frozen
class Channels:
    """The channels of a convolution, of one group or of several.

    Args:
        groups: The number of groups.
        per_input: The input channels of a group.
        per_output: The output channels of a group.
        transposed: Whether the kernel's dims are (input, output) channels, not the other way.
    """

    groups: int
    per_input: int
    per_output: int
    transposed: bool

    @property
    def input(self) -> str:
        """The channel dim of the input. Of several groups, whole ones are split only."""
        return "c" if self.groups == 1 else f"{self.per_input}g"

    @property
    def output(self) -> str:
        """The channel dim of the output."""
        return "o" if self.groups == 1 else f"{self.per_output}g"

    @property
    def kernel(self) -> str:
        """The first two dims of the kernel; the second one is that of one group."""
        if self.groups > 1:
            return f"{self.per_input if self.transposed else self.per_output}g -"
        return "c o" if self.transposed else "o c"


def _whole(count: int) -> str:
    return " -" * count


@lru_cache
def convolution(channels: Channels, spatial: int, bias: bool) -> OperatorRule:
    """A convolution over `spatial` dims: its channels are contracted, within each group.

    Example:
        >>> str(convolution(Channels(1, 3, 8, transposed=False), spatial=2, bias=True))
        'n c - -, o c - -, + o -> n o - -'
        >>> str(convolution(Channels(4, 1, 2, transposed=False), spatial=1, bias=False))
        'n g -, 2g - - -> n 2g -'
    """
    whole = _whole(spatial)
    operands = [
        Operand("input", f"n {channels.input}{whole}"),
        Operand("kernel", f"{channels.kernel}{whole}"),
    ]
    if bias:
        operands.append(Operand("bias", channels.output, added=True))
    return OperatorRule(tuple(operands), (Result("output", f"n {channels.output}{whole}"),))


@lru_cache
def convolution_backward(channels: Channels, spatial: int) -> OperatorRule:
    """The gradients of a convolution.

    Example:
        >>> str(convolution_backward(Channels(1, 3, 8, transposed=False), spatial=1))
        'n o -, n c -, o c - -> n c -, o c -, o'
    """
    whole = _whole(spatial)
    inputs, kernel = f"n {channels.input}{whole}", f"{channels.kernel}{whole}"
    return OperatorRule(
        (
            Operand("gradient", f"n {channels.output}{whole}"),
            Operand("input", inputs),
            Operand("kernel", kernel),
        ),
        (
            Result("of input", inputs, of=("gradient", "kernel"), like="input"),
            Result("of kernel", kernel, of=("gradient", "input"), like="kernel"),
            Result("of bias", channels.output, of=("gradient",)),
        ),
    )


@lru_cache
def along(ndim: int, whole: frozenset[int], operands: int = 1, results: int = 1) -> OperatorRule:
    """What works along the dims in `whole` only: pads; pools, along those of a plane; along none.

    Example:
        >>> str(along(3, frozenset({1})))
        'a - c -> a - c'
    """
    dims = " ".join("-" if dim in whole else letter(dim) for dim in range(ndim))
    return OperatorRule(
        tuple(Operand(f"operand {number}", dims) for number in range(operands)),
        tuple(Result(f"result {number}", dims) for number in range(results)),
    )


@lru_cache
def pool(
    ndim: int,
    windows: tuple[int | None, ...],
    pooled: tuple[bool, ...],
    results: int = 1,
    numbered: bool = False,
) -> OperatorRule:
    """A pool of the last dims, or its gradient: windows that do not overlap are not cut.

    Args:
        ndim: The dims of an image.
        windows: For each of the last dims the size of a window that divides it; None for a dim
            that is not split.
        pooled: For each operand, whether it is pooled. The results are where no operand is.
        results: How many results there are.
        numbered: Whether the numbers of the elements of each of the last dims are operands too.

    Example:
        >>> str(pool(4, (2, None), (False,)))
        'a b 2c - -> a b c -'
        >>> str(pool(3, (3,), (True, False), numbered=True))
        'a b c, a b 3c, 3c -> a b 3c'
    """
    first = ndim - len(windows)
    rest = [letter(dim) for dim in range(first)]
    small = [letter(first + at) if size else "-" for at, size in enumerate(windows)]
    large = [f"{size}{dim}" if size else "-" for size, dim in zip(windows, small, strict=True)]
    images = {True: " ".join((*rest, *small)), False: " ".join((*rest, *large))}
    operands = [Operand(f"operand {at}", images[kind]) for at, kind in enumerate(pooled)]
    if numbered:
        operands += [Operand(f"numbers {at}", dim) for at, dim in enumerate(large)]
    is_pooled = not any(pooled)
    return OperatorRule(
        tuple(operands), tuple(Result(f"result {at}", images[is_pooled]) for at in range(results))
    )


@lru_cache
def whole(operands: tuple[int, ...], result: int) -> OperatorRule:
    """What is not split.

    Args:
        operands: How many dims each operand has.
        result: How many dims the result has.

    Example:
        >>> str(whole((2, 1), 2))
        '- -, - -> - -'
    """
    return OperatorRule(
        tuple(Operand(f"operand {number}", _whole(n).strip()) for number, n in enumerate(operands)),
        (Result("result", _whole(result).strip()),),
    )


@lru_cache
def unbind(ndim: int, dim: int, count: int) -> OperatorRule:
    """A tensor in its `count` slices along `dim`.

    Example:
        >>> str(unbind(3, 1, 2))
        'a - c -> a c, a c'
    """
    dims = [letter(each) for each in range(ndim)]
    rest = " ".join(dims[:dim] + dims[dim + 1 :])
    dims[dim] = "-"
    return OperatorRule(
        (Operand("tensor", " ".join(dims)),),
        tuple(Result(f"slice {number}", rest) for number in range(count)),
    )


@lru_cache
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
    count = "n" if accumulates else "-"
    rest = [letter(dim) for dim in range(indexed, ndim)]
    dims = " ".join(["-"] * indexed + rest)
    return OperatorRule(
        (
            Operand("tensor", dims, added=accumulates),
            *(Operand(f"index {number}", count) for number in range(indexed)),
            Operand("values", " ".join([count, *rest])),
        ),
        (Result("tensor", dims),),
    )


@lru_cache
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
    before = [letter(dim) for dim in range(first)]
    after = [letter(dim) for dim in range(first + indexed, ndim)]
    dims = [f"i{dim}" for dim in range(found)]
    return OperatorRule(
        (
            Operand("tensor", " ".join([*before, *["-"] * indexed, *after])),
            *(Operand(f"index {number}", " ".join(dims)) for number in range(indexed)),
        ),
        (Result("elements", " ".join([*before, *dims, *after])),),
    )


@lru_cache
def im2col(batched: bool, window: int) -> OperatorRule:
    """Windows of `window` elements as columns: the channels of the result are blocks of them.

    Example:
        >>> str(im2col(batched=True, window=6))
        'n c - - -> n 6c -'
    """
    batch = "n " * batched
    return OperatorRule(
        (Operand("images", f"{batch}c - -"),), (Result("columns", f"{batch}{window}c -"),)
    )


@lru_cache
def col2im(batched: bool, window: int) -> OperatorRule:
    """Columns added up to images.

    Example:
        >>> str(col2im(batched=False, window=4))
        '4c - -> c - -'
    """
    batch = "n " * batched
    return OperatorRule(
        (Operand("columns", f"{batch}{window}c -"),), (Result("images", f"{batch}c - -"),)
    )


@lru_cache
def attention(heads: str, mask: str | None) -> OperatorRule:
    """Attention over (batch, heads, length, size): every head is on its own.

    Args:
        heads: The first two dims: "b h", with "-" for one that query, key and value differ in.
        mask: Those of the mask, with "-" for one that it is broadcast over; None without a mask.

    Example:
        >>> str(attention("b h", mask="b -"))
        'b h - -, b h - -, b h - -, b - - - -> b h - -, b h -'
    """
    operands = [Operand(name, f"{heads} - -") for name in ("query", "key", "value")]
    return OperatorRule(
        (*operands, *_mask(mask)), (Result("output", f"{heads} - -"), Result("sums", f"{heads} -"))
    )


@lru_cache
def attention_backward(heads: str, mask: str | None) -> OperatorRule:
    """The gradients of query, key and value.

    Example:
        >>> str(attention_backward("b -", mask=None)).partition(" -> ")[2]
        'b - - -, b - - -, b - - -'
    """
    names = ("gradient", "query", "key", "value", "output")
    operands = [Operand(name, f"{heads} - -") for name in names]
    return OperatorRule(
        (*operands, Operand("sums", f"{heads} -"), *_mask(mask)),
        tuple(Result(f"of {name}", f"{heads} - -") for name in names[1:4]),
    )


def _mask(dims: str | None) -> tuple[Operand, ...]:
    return () if dims is None else (Operand("mask", f"{dims} - -"),)


def letter(dim: int) -> str:
    """The factor that stands for dim number `dim` of a tensor: a, b, c, ..."""
    return chr(ord("a") + dim) if dim < 26 else f"d{dim}"
