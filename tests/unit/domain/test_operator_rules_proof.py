"""Each rule, over all ranks: the operator on the parts gives the parts of its result."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcore.domain import operator_rules_basic as basic
from shardcore.domain import operator_rules_table as table
from tests.unit.domain import numpy_operators as reference
from tests.unit.domain.rule_proof import Call, as_indices, names_of_rules, prove, sizes


@st.composite
def windows(draw):
    """Channels, a window, the shapes of input and kernel, and the spatial sizes of the output."""
    groups = draw(st.sampled_from([1, 4, 1, 3, 5]))
    per_input, per_output = draw(st.sampled_from([2, 3, 1])), draw(st.sampled_from([4, 3, 2, 1]))
    channels = table.Channels(groups, per_input, per_output, draw(st.booleans()))
    window = reference.Window(
        draw(st.integers(1, 2)), draw(st.integers(1, 2)), groups, channels.transposed
    )
    spatial = draw(st.integers(1, 2))
    image, kernel = [draw(st.integers(5, 6))] * spatial, [draw(st.integers(1, 3))] * spatial
    inputs, outputs = groups * per_input, groups * per_output
    dims = (inputs, per_output) if channels.transposed else (outputs, per_input)
    shapes = [(draw(sizes), inputs, *image), (*dims, *kernel)]
    return channels, window, shapes, (outputs, *window.output_sizes(image, kernel))


@st.composite
def convolutions(draw):
    channels, window, shapes, (outputs, *sizes) = draw(windows())
    bias = draw(st.booleans())

    def run(parts):
        x, kernel, *added = parts
        here = local(window, channels, x)
        return [reference.convolve(x, kernel, added[0] if added else None, here)]

    shapes += [(outputs,)] * bias
    return Call(table.convolution(channels, len(sizes), bias), shapes, run)


@st.composite
def convolutions_backward(draw):
    channels, window, shapes, output = draw(windows())

    def run(parts):
        return reference.convolve_backward(*parts, local(window, channels, parts[1]))

    shapes = [(shapes[0][0], *output), *shapes]
    return Call(table.convolution_backward(channels, len(output) - 1), shapes, run)


def local(window, channels, x):
    """The window of a rank that has `x`: of several groups it has its own only."""
    groups = 1 if channels.groups == 1 else x.shape[1] // channels.per_input
    return reference.Window(window.stride, window.dilation, groups, window.transposed)


@st.composite
def max_pools(draw):
    shape = (*draw(st.lists(sizes, max_size=2)), 4, 5)
    plane, size = frozenset({len(shape) - 2, len(shape) - 1}), draw(st.integers(1, 3))
    if draw(st.booleans()):
        rule = basic.along(len(shape), plane, results=2)
        return Call(rule, [shape], lambda parts: reference.max_pool(*parts, size))

    def backward(parts):
        gradient, x = parts
        return [reference.max_pool_backward(gradient, x, reference.max_pool(x, size)[1], size)]

    pooled = (*shape[:-2], 5 - size, 6 - size)
    return Call(basic.along(len(shape), plane, operands=2), [pooled, shape], backward)


@st.composite
def pools(draw):
    """The largest of windows that do not overlap, and its place in the plane; the gradient."""
    rows, columns = draw(st.integers(1, 3)), draw(st.sampled_from([None, 1, 2]))
    count, down, across = draw(sizes), draw(sizes), draw(sizes)
    shape = (count, down * rows, across * (columns or 1))
    pooled = (count, down, across if columns else 1)

    def tiles(x):
        """The elements of each window, along the last dim."""
        width = columns or x.shape[2]
        found = x.reshape(x.shape[0], x.shape[1] // rows, rows, x.shape[2] // width, width)
        return np.moveaxis(found, 2, 3).reshape(*found.shape[:2], found.shape[3], -1)

    def largest(parts):
        x, down, across = parts
        numbers = tiles(np.broadcast_to(down[:, None] * 10 + across, x.shape))
        at = tiles(x).argmax(-1)[..., None]
        return [np.take_along_axis(each, at, -1)[..., 0] for each in (tiles(x), numbers)]

    def gradient(parts):
        gradient, x = parts
        return [x * gradient.repeat(rows, 1).repeat(columns or x.shape[2], 2)]

    if draw(st.booleans()):
        rule = table.pool(3, (rows, columns), (False,), results=2, numbered=True)
        return Call(rule, [shape, shape[1:2], shape[2:]], largest)
    return Call(table.pool(3, (rows, columns), (True, False)), [pooled, shape], gradient)


@st.composite
def pads(draw):
    shape = tuple(draw(st.lists(sizes, min_size=1, max_size=4)))
    widths = [draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (1, 2)])) for _ in shape]
    padded = frozenset(dim for dim, width in enumerate(widths) if any(width))
    mode = draw(st.sampled_from(["constant", "edge", "symmetric"]))
    rule = basic.along(len(shape), padded)
    return Call(rule, [shape], lambda parts: [np.pad(parts[0], widths, mode=mode)])


@st.composite
def index_puts(draw):
    indexed, count = draw(st.integers(1, 2)), draw(sizes)
    looked_up, rest = (3, 4)[:indexed], tuple(draw(st.lists(sizes, max_size=2)))
    accumulates = draw(st.booleans())

    def run(parts):
        tensor, *numbers, values = parts
        at = tuple(as_indices(n, upto) for n, upto in zip(numbers, looked_up, strict=True))
        result = tensor.copy()
        if accumulates:
            np.add.at(result, at, values)
        else:
            result[at] = values
        return [result]

    shapes = [(*looked_up, *rest), *[(count,)] * indexed, (count, *rest)]
    rule = basic.index_put(indexed + len(rest), indexed, accumulates)
    return Call(rule, shapes, run)


@st.composite
def indexings(draw):
    before, after = (tuple(draw(st.lists(sizes, max_size=1))) for _ in range(2))
    looked_up = (3, 4)[: draw(st.integers(1, 2))]
    found = tuple(draw(st.lists(sizes, min_size=1, max_size=2)))

    def run(parts):
        tensor, *numbers = parts
        at = (as_indices(n, upto) for n, upto in zip(numbers, looked_up, strict=True))
        return [tensor[(slice(None),) * len(before) + tuple(at)]]

    shape = (*before, *looked_up, *after)
    rule = basic.index(len(shape), len(before), len(looked_up), len(found))
    return Call(rule, [shape, *[found] * len(looked_up)], run)


@st.composite
def wholes(draw):
    shape = tuple(draw(st.lists(sizes, max_size=2)))
    return Call(table.whole((len(shape),), len(shape)), [shape], lambda parts: parts)


@st.composite
def im2cols(draw):
    batch, channels = draw(st.lists(sizes, max_size=1)), draw(sizes)
    size = draw(st.integers(1, 3))
    rule = table.im2col(bool(batch), size**2)
    shape = (*batch, channels, 4, 5)
    return Call(rule, [shape], lambda parts: [reference.im2col(parts[0], size)])


@st.composite
def col2ims(draw):
    batch, channels = draw(st.lists(sizes, max_size=1)), draw(sizes)
    size = draw(st.integers(1, 3))
    rule = table.col2im(bool(batch), size**2)
    shape = (*batch, channels * size**2, (5 - size) * (6 - size))
    return Call(rule, [shape], lambda parts: [reference.col2im(parts[0], (4, 5), size)])


@st.composite
def masks(draw, batch, heads):
    """The first two dims of a mask in words, and its shape; or None, for no mask."""
    if draw(st.booleans()):
        return None, []
    broadcast = draw(st.booleans()), draw(st.booleans())
    words = " ".join("-" if wide else letter for wide, letter in zip(broadcast, "bh", strict=True))
    first = (1 if wide else size for wide, size in zip(broadcast, (batch, heads), strict=True))
    return words, [(*first, 3, 5)]


@st.composite
def attentions(draw):
    batch, heads = draw(sizes), draw(sizes)
    mask, shape = draw(masks(batch, heads))
    of_query, of_key = (batch, heads, 3, 2), (batch, heads, 5, 2)
    shapes = [of_query, of_key, of_key, *shape]
    return Call(table.attention("b h", mask), shapes, lambda parts: reference.attend(*parts))


@st.composite
def attentions_backward(draw):
    batch, heads = draw(sizes), draw(sizes)
    mask, shape = draw(masks(batch, heads))
    of_query, of_key = (batch, heads, 3, 2), (batch, heads, 5, 2)
    shapes = [of_query, of_query, of_key, of_key, of_query, of_query[:3], *shape]
    rule = table.attention_backward("b h", mask)
    return Call(rule, shapes, lambda parts: reference.attend_backward(*parts))


# The calls of each rule.
CALLS = {
    "along": st.one_of(pads(), max_pools()),
    "attention": attentions(),
    "attention_backward": attentions_backward(),
    "col2im": col2ims(),
    "convolution": convolutions(),
    "convolution_backward": convolutions_backward(),
    "im2col": im2cols(),
    "index": indexings(),
    "index_put": index_puts(),
    "pool": pools(),
    "whole": wholes(),
}


FACTORS = {
    "along": "abc",
    "attention": "bh",
    "attention_backward": "bh",
    "col2im": "nc",
    "convolution": "ncog",
    "convolution_backward": "ncog",
    "im2col": "nc",
    "index": ("a", "b", "c", "d", "i0", "i1"),
    "index_put": "nbcd",
    "pool": "abc",
    "whole": "",  # it has none
}


def test_every_rule_is_proved():
    assert set(CALLS) == names_of_rules(table) | {"along", "index", "index_put"}


@pytest.mark.parametrize(("name", "factor"), [(n, f) for n in CALLS for f in FACTORS[n]])
# A factor is in few of a rule's calls, and others are passed over.
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_the_parts_give_the_whole(name, factor, data):
    prove(data.draw(CALLS[name]), factor, data)
