"""The rules of layers, over all ranks."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcore.domain.engine.rules import layers
from tests.unit.domain.engine.rules import numpy_operators as reference
from tests.unit.domain.engine.rules.proof import Call, names_of_rules, prove, sizes


@st.composite
def windows(draw):
    """Channels, a window, the shapes of input and kernel, and the spatial sizes of the output."""
    groups = draw(st.sampled_from([1, 4, 1, 3, 5]))
    per_input, per_output = draw(st.sampled_from([2, 3, 1])), draw(st.sampled_from([4, 3, 2, 1]))
    channels = layers.Channels(groups, per_input, per_output, draw(st.booleans()))
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
    return Call(layers.convolution(channels, len(sizes), bias), shapes, run)


@st.composite
def convolutions_backward(draw):
    channels, window, shapes, output = draw(windows())

    def run(parts):
        return reference.convolve_backward(*parts, local(window, channels, parts[1]))

    shapes = [(shapes[0][0], *output), *shapes]
    return Call(layers.convolution_backward(channels, len(output) - 1), shapes, run)


def local(window, channels, x):
    """The window of a rank that has `x`: of several groups it has its own only."""
    groups = 1 if channels.groups == 1 else x.shape[1] // channels.per_input
    return reference.Window(window.stride, window.dilation, groups, window.transposed)


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
        rule = layers.pool(3, (rows, columns), (False,), results=2, numbered=True)
        return Call(rule, [shape, shape[1:2], shape[2:]], largest)
    return Call(layers.pool(3, (rows, columns), (True, False)), [pooled, shape], gradient)


@st.composite
def im2cols(draw):
    batch, channels = draw(st.lists(sizes, max_size=1)), draw(sizes)
    size = draw(st.integers(1, 3))
    rule = layers.im2col(bool(batch), size**2)
    shape = (*batch, channels, 4, 5)
    return Call(rule, [shape], lambda parts: [reference.im2col(parts[0], size)])


@st.composite
def col2ims(draw):
    batch, channels = draw(st.lists(sizes, max_size=1)), draw(sizes)
    size = draw(st.integers(1, 3))
    rule = layers.col2im(bool(batch), size**2)
    shape = (*batch, channels * size**2, (5 - size) * (6 - size))
    return Call(rule, [shape], lambda parts: [reference.col2im(parts[0], (4, 5), size)])


@st.composite
def masks(draw, batch, heads):
    """The first three dims of a mask in words, and its shape; or None, for no mask."""
    if draw(st.booleans()):
        return None, []
    broadcast = draw(st.booleans()), draw(st.booleans())
    words = " ".join("-" if wide else letter for wide, letter in zip(broadcast, "bh", strict=True))
    first = (1 if wide else size for wide, size in zip(broadcast, (batch, heads), strict=True))
    return f"{words} q", [(*first, 3, 5)]


# Only a ring shards them: `test_ring.py`.
LENGTHS = frozenset({"q", "k"})


@st.composite
def attentions(draw):
    batch, heads = draw(sizes), draw(sizes)
    mask, shape = draw(masks(batch, heads))
    of_query, of_key = (batch, heads, 3, 2), (batch, heads, 5, 2)
    shapes = [of_query, of_key, of_key, *shape]
    rule = layers.attention("b h", mask).without(LENGTHS)
    return Call(rule, shapes, lambda parts: reference.attend(*parts))


@st.composite
def attentions_backward(draw):
    batch, heads = draw(sizes), draw(sizes)
    mask, shape = draw(masks(batch, heads))
    of_query, of_key = (batch, heads, 3, 2), (batch, heads, 5, 2)
    shapes = [of_query, of_query, of_key, of_key, of_query, of_query[:3], *shape]
    rule = layers.attention_backward("b h", mask).without(LENGTHS)
    return Call(rule, shapes, lambda parts: reference.attend_backward(*parts))


@st.composite
def recurrences(draw):
    batch, first, cells = draw(sizes), draw(st.booleans()), draw(st.booleans())
    rows, state = (batch, 3) if first else (3, batch), (1, batch, 4)
    shapes = [(*rows, 2), *[state] * (1 + cells), (5,), (2, 4), (4,)]

    def run(parts):
        x, state, *of_cells, _packed, weight, bias = parts
        output, *others = reference.recur(by_steps(x, first), state, of_cells, weight, bias)
        return [by_steps(output, first), *others]

    return Call(layers.recurrent(first, (2, 1), cells, packed=True), shapes, run)


@st.composite
def recurrences_backward(draw):
    batch, first = draw(sizes), draw(st.booleans())
    rows, state = (batch, 3) if first else (3, batch), (1, batch, 4)
    # With the gradients of all results; or with that of the output, without cells.
    cells = draw(st.booleans())
    given = [(*rows, 4), *[state] * 2 * cells]
    shapes = [(*rows, 2), *[state] * (1 + cells), (*rows, 4), *given, (5,), (2, 4), (4,)]
    rule = layers.recurrent_backward(first, (2, 1), cells, (True, cells, cells), kept=1)

    def run(parts):
        x, state, *_ = parts
        gradient, *others, _kept, weight, _bias = parts[3 + cells :]
        of_state, of_cells = others or (np.zeros_like(state), np.zeros_like(state))
        operands = by_steps(x, first), weight, by_steps(gradient, first), of_state, [of_cells]
        of_x, *found = reference.recur_backward(*operands)
        return [by_steps(of_x, first), *found]

    return Call(rule, shapes, run)


def by_steps(x, batch_first):
    return x.swapaxes(0, 1) if batch_first else x


# The calls of each rule, and the factors that they have.
CALLS = {
    "attention": (attentions(), "bh"),
    "attention_backward": (attentions_backward(), "bh"),
    "col2im": (col2ims(), "nc"),
    "convolution": (convolutions(), "ncog"),
    "convolution_backward": (convolutions_backward(), "ncog"),
    "im2col": (im2cols(), "nc"),
    "pool": (pools(), "abc"),
    "recurrent": (recurrences(), "n"),
    "recurrent_backward": (recurrences_backward(), "n"),
}


def test_every_rule_is_proved():
    assert {name.partition(",")[0] for name in CALLS} == names_of_rules(layers)


@pytest.mark.parametrize(("name", "factor"), [(n, f) for n in CALLS for f in CALLS[n][1]])
# A factor is in few of a rule's calls, and others are passed over.
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_the_shards_give_the_full_result(name, factor, data):
    prove(data.draw(CALLS[name][0]), factor, data)
