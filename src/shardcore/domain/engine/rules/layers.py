"""Rules of convolutions, pools, attention and recurrent layers.

The first line of each function says what the operator does whose rule it builds.
Adapters name the operators that a rule is for; docs/reference/operators.md lists the rules.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Self

import attrs

from shardcore.domain.engine.rules.rule import OperatorRule, Shape, letters, rule, rule_of


@attrs.frozen
class Channels:
    """The channels of a convolution, of one group or of several."""

    groups: int
    per_input: int  # the input channels of a group
    per_output: int  # the output channels of a group
    transposed: bool  # whether the kernel's dims are (input, output) channels, not the other way

    @classmethod
    def of(cls, kernel: Shape, groups: int, transposed: bool) -> Self:
        """Reads the channels of a convolution off the shape of its kernel.

        Example:
            >>> Channels.of((12, 1, 3, 3), groups=4, transposed=False)
            Channels(groups=4, per_input=1, per_output=3, transposed=False)
        """
        first, second = kernel[:2]
        if transposed:
            return cls(groups, first // groups, second, transposed=True)
        return cls(groups, second, first // groups, transposed=False)

    @property
    def input(self) -> str:
        """The channel dim of the input. If there are several groups, no group is cut."""
        return "c" if self.groups == 1 else f"{self.per_input}g"

    @property
    def output(self) -> str:
        """The channel dim of the output."""
        return "o" if self.groups == 1 else f"{self.per_output}g"

    @property
    def kernel(self) -> str:
        """The first two dims of the kernel; the second one has the channels of one group."""
        if self.groups > 1:
            return f"{self.per_input if self.transposed else self.per_output}g -"
        return "c o" if self.transposed else "o c"


def convolution(channels: Channels, spatial: int, bias: bool) -> OperatorRule:
    """Contracts channels, by group, over `spatial` dims.

    Example:
        >>> str(convolution(Channels(1, 3, 8, transposed=False), spatial=2, bias=True))
        'n c - -, o c - -, + o -> n o - -'
        >>> str(convolution(Channels(4, 1, 2, transposed=False), spatial=1, bias=False))
        'n g -, 2g - - -> n 2g -'
    """
    plane, output = " -" * spatial, channels.output
    added = f", + {output}" if bias else ""
    return rule(f"n {channels.input}{plane}, {channels.kernel}{plane}{added} -> n {output}{plane}")


def convolution_backward(channels: Channels, spatial: int) -> OperatorRule:
    """Computes the gradients of input, kernel and bias from that of the output.

    Example:
        >>> str(convolution_backward(Channels(1, 3, 8, transposed=False), spatial=1))
        'n o -, n c -, o c - -> n c -, o c -, o'
    """
    plane = " -" * spatial
    inputs, kernel = f"n {channels.input}{plane}", f"{channels.kernel}{plane}"
    gradient = f"n {channels.output}{plane}"
    return rule(
        f"{gradient}, {inputs}, {kernel} -> {inputs}, {kernel}, {channels.output}",
        of=((0, 2), (0, 1), (0,)),
        like=(1, 2),
    )


def windows(
    plane: Shape,
    window: int | Sequence[int],
    stride: int | Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
) -> tuple[int | None, ...]:
    """Finds, per dim of a plane, the size of the window of a pool if it can be sharded.

    It is None where windows overlap, leave gaps, or do not fill the dim. The operands have the
    names and defaults of torch.

    Example:
        >>> windows((8, 9), 2), windows((8, 9), [2, 3], stride=[2, 3])
        ((2, None), (2, 3))
        >>> windows((8, 9), 2, stride=1)
        (None, None)
    """
    size, step = (_of_dims(numbers, len(plane)) for numbers in (window, stride))
    moved = bool(step) and step != size
    plain = not moved and not any(_of_dims(padding, 1)) and set(_of_dims(dilation, 1)) == {1}
    pairs = zip(size, plane, strict=True)
    return tuple(
        window_size if plain and full % window_size == 0 else None for window_size, full in pairs
    )


def _of_dims(number: int | Sequence[int], ndim: int) -> list[int]:
    """Expands a number to each dim of a plane; none if none is given."""
    given = [number] if isinstance(number, int) else list(number)
    return given * ndim if len(given) == 1 else given


def pool(
    ndim: int,
    windows: tuple[int | None, ...],
    pooled: tuple[bool, ...],
    results: int = 1,
    numbered: bool = False,
) -> OperatorRule:
    """Pools the last dims, or computes the gradient of that; no window is cut.

    For each of the last dims, `windows` has the size of a window that divides it, None if it is not
    sharded. `pooled` says which operands are pooled; the results are if none is. If `numbered`, the
    indices of the elements of each of these dims are operands too.

    Example:
        >>> str(pool(4, (2, None), (False,)))
        'a b 2c - -> a b c -'
        >>> str(pool(3, (3,), (True, False), numbered=True))
        'a b c, a b 3c, 3c -> a b 3c'
    """
    names, first = letters(ndim), ndim - len(windows)
    sized = list(zip(windows, names[first:], strict=True))
    large = [f"{size}{name}" if size else "-" for size, name in sized]
    small = [name if size else "-" for size, name in sized]
    images = {False: names[:first] + large, True: names[:first] + small}
    operands = [images[kind] for kind in pooled] + [[dim] for dim in large if numbered]
    return rule_of(operands, [images[not any(pooled)]] * results)


def im2col(batched: bool, window: int) -> OperatorRule:
    """Flattens windows: the channels of the result are blocks of `window` elements."""
    batch = "n " * batched
    return rule(f"{batch}c - - -> {batch}{window}c -")


def col2im(batched: bool, window: int) -> OperatorRule:
    """Adds columns to images, the reverse of `im2col`."""
    batch = "n " * batched
    return rule(f"{batch}{window}c - -> {batch}c - -")


def attention(heads: str, mask: str | None) -> OperatorRule:
    """Attends over (batch, heads, length, size).

    The lengths are those of the queries, `q`, and of the keys, `k`. Only a ring shards them, since
    a sum over keys is no attention (`domain.engine.ring`). The first two dims are `heads`:
    "b h", with "-" for one in which query, key and value differ. The first three of the mask are
    `mask`, with "-" for a broadcast dim.

    Example:
        >>> str(attention("b h", mask="b - q"))
        'b h q -, b h k -, b h k -, b - q - -> b h q -, b h q'
    """
    query, key = f"{heads} q -", f"{heads} k -"
    return rule(f"{query}, {key}, {key}{_mask(mask)} -> {query}, {heads} q")


def attention_dims(inputs: Sequence[Shape], mask: Shape | None) -> tuple[str, str | None]:
    """Names the first dims of query, key and value, and of the mask, as `attention` takes them.

    Example:
        >>> attention_dims([(2, 8, 5, 4), (2, 1, 6, 4), (2, 1, 6, 4)], mask=(1, 8, 5, 6))
        ('b -', '- - q')
    """
    query, *others = inputs
    heads = [
        letter if all(other[dim] == query[dim] for other in others) else "-"
        for dim, letter in enumerate("bh")
    ]
    if mask is None:
        return " ".join(heads), None
    sizes = zip([*heads, "q"], mask, query, strict=False)
    return " ".join(heads), " ".join(letter if size == of else "-" for letter, size, of in sizes)


def attention_backward(
    heads: str, mask: str | None, trains_mask: bool = False, others: tuple[int, ...] = ()
) -> OperatorRule:
    """Computes the gradient of `attention`.

    Its operands are the gradient of the output, query, key and value, the output, its sums, the
    mask, and `others`, given by their numbers of dims, which every rank reads in full. If
    `trains_mask`, the last result is the gradient of the mask.

    Example:
        >>> str(attention_backward("b -", mask=None)).partition(" -> ")[2]
        'b - q -, b - k -, b - k -'
    """
    query, key, of_mask = f"{heads} q -", f"{heads} k -", _mask(mask)
    operands = f"{query}, {query}, {key}, {key}, {query}, {heads} q{of_mask}"
    read = "".join(f", {_read(ndim)}" for ndim in others)
    return rule(f"{operands}{read} -> {query}, {key}, {key}{of_mask * trains_mask}")


def _mask(dims: str | None) -> str:
    return "" if dims is None else f", {dims} -"


def recurrent(
    batch_first: bool, weights: tuple[int, ...], cells: bool, packed: bool = False
) -> OperatorRule:
    """Runs recurrent layers, of which only the batch is sharded.

    Its operands are the input, as (batch, steps, size) with `batch_first`, else as (steps, batch,
    size); the initial state, and with `cells` that of the cells; if `packed` one tensor that has
    all weights; and the weights, given by their numbers of dims. The results are the output and the
    last states.

    Example:
        >>> str(recurrent(True, weights=(2, 1), cells=False))
        'n - -, - n -, - -, - -> n - -, - n -'
    """
    rows, states = _recurrent_rows(batch_first), [_STATE] * (1 + cells)
    given = [rows, *states, *["-"] * packed, *map(_read, weights)]
    return rule(f"{', '.join(given)} -> {', '.join([rows, *states])}")


def recurrent_backward(
    batch_first: bool,
    weights: tuple[int, ...],
    cells: bool,
    gradients: tuple[bool, ...],
    kept: int,
) -> OperatorRule:
    """Computes the gradient of `recurrent`.

    Its operands are the input, the initial states, the output, the gradients of the output and of
    the last states, as far as `gradients` says that they are given; `kept` tensors that the layers
    made for their gradient, and that no other rank reads; and the weights. The results are the
    gradients of the input, of both initial states, and of the weights, which are sums over the
    batch.

    Example:
        >>> given = (True, False, False)
        >>> str(recurrent_backward(False, weights=(2,), cells=False, gradients=given, kept=1))
        '- n -, - n -, - n -, - n -, -, - - -> - n -, - n -, - n -, - -'
    """
    rows = _recurrent_rows(batch_first)
    given_gradients = compress((rows, _STATE, _STATE), gradients)
    states, read = [_STATE] * (1 + cells), list(map(_read, weights))
    given = [rows, *states, rows, *given_gradients, *["-"] * kept, *read]
    results = [rows, _STATE, _STATE, *read]
    return rule(f"{', '.join(given)} -> {', '.join(results)}")


# The dims (layers and directions, batch, size).
_STATE = "- n -"


def _recurrent_rows(batch_first: bool) -> str:
    return "n - -" if batch_first else "- n -"


def _read(ndim: int) -> str:
    """Writes the dims of a tensor that every rank reads in full."""
    return " ".join("-" * ndim) or "()"
