"""Operators on NumPy arrays, for the proof of their rules: small, slow, by definition."""

from itertools import product

import numpy as np


def convolve(x, kernel, bias, window):
    """A convolution; `window` says its strides, dilation, groups, and whether it is transposed."""
    x, kernel = window.grouped(x, kernel)
    sizes = window.output_sizes(x.shape[3:], kernel.shape[3:])
    y = np.zeros((*x.shape[:2], kernel.shape[1], *sizes))
    for offset in np.ndindex(kernel.shape[3:]):
        reads, writes = window.meets(offset, x.shape[3:], sizes)
        y[writes] += np.einsum("ngc...,goc->ngo...", x[reads], kernel[(..., *offset)])
    y = y.reshape(y.shape[0], -1, *sizes)
    return y if bias is None else y + bias.reshape(-1, *[1] * len(sizes))


def convolve_backward(gradient, x, kernel, window):
    """The gradients of input, kernel and bias."""
    shapes = x.shape, kernel.shape
    x, kernel = window.grouped(x, kernel)
    sizes = gradient.shape[2:]
    grouped = gradient.reshape(*x.shape[:2], -1, *sizes)
    of_x, of_kernel = np.zeros_like(x), np.zeros_like(kernel)
    for offset in np.ndindex(kernel.shape[3:]):
        reads, writes = window.meets(offset, x.shape[3:], sizes)
        seen, given = x[reads], grouped[writes]
        of_x[reads] += np.einsum("ngo...,goc->ngc...", given, kernel[(..., *offset)])
        flat = given.reshape(*given.shape[:3], -1), seen.reshape(*seen.shape[:3], -1)
        of_kernel[(..., *offset)] = np.einsum("ngos,ngcs->goc", *flat)
    if window.transposed:
        of_kernel = of_kernel.swapaxes(1, 2)
    summed = gradient.sum((0, *range(2, gradient.ndim)))
    return of_x.reshape(shapes[0]), of_kernel.reshape(shapes[1]), summed


class Window:
    """The geometry of a convolution: pairs of input and output elements."""

    def __init__(self, stride, dilation, groups, transposed):
        self.stride, self.dilation, self.transposed = stride, dilation, transposed
        self.groups = groups

    def grouped(self, x, kernel):
        """The input as (batch, group, channel, ...), the kernel as (group, out, in, ...)."""
        groups = self.groups
        x = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
        kernel = kernel.reshape(groups, -1, *kernel.shape[1:])
        return x, kernel.swapaxes(1, 2) if self.transposed else kernel

    def output_sizes(self, sizes, kernel):
        spans = [self.dilation * (size - 1) + 1 for size in kernel]
        if self.transposed:
            return [self.stride * (n - 1) + span for n, span in zip(sizes, spans, strict=True)]
        return [(n - span) // self.stride + 1 for n, span in zip(sizes, spans, strict=True)]

    def meets(self, offset, inputs, outputs):
        """The elements of input and output that an element of the kernel joins."""
        small = inputs if self.transposed else outputs
        starts = [self.dilation * at for at in offset]
        steps = [
            slice(start, start + self.stride * (count - 1) + 1, self.stride)
            for start, count in zip(starts, small, strict=True)
        ]
        every, strided = (...,), (slice(None),) * 3 + tuple(steps)
        return (every, strided) if self.transposed else (strided, every)


def windows(x, size):
    """All windows of `size` along the last two dims: (..., windows, elements)."""
    rows, columns = (n - size + 1 for n in x.shape[-2:])
    found = [
        x[..., i : i + size, j : j + size].reshape(*x.shape[:-2], -1)
        for i, j in product(range(rows), range(columns))
    ]
    return np.stack(found, axis=-2)


def max_pool(x, size):
    """The largest of each window, and its place in the window."""
    seen = windows(x, size)
    shape = (*x.shape[:-2], *(n - size + 1 for n in x.shape[-2:]))
    return seen.max(-1).reshape(shape), seen.argmax(-1).reshape(shape)


def max_pool_backward(gradient, x, places, size):
    """The gradient of each window goes to its largest element."""
    spread = np.eye(size * size)[places] * gradient[..., None]
    return from_windows(spread.reshape(*x.shape[:-2], -1, size**2), x.shape, size)


def from_windows(seen, shape, size):
    """The adjoint of `windows`."""
    x = np.zeros(shape)
    rows, columns = (n - size + 1 for n in shape[-2:])
    for number, (i, j) in enumerate(product(range(rows), range(columns))):
        part = seen[..., number, :].reshape(*shape[:-2], size, size)
        x[..., i : i + size, j : j + size] += part
    return x


def im2col(images, size):
    """Windows as columns: (..., channels x elements, windows)."""
    seen = windows(images, size).swapaxes(-1, -2)
    return seen.reshape(*images.shape[:-3], -1, seen.shape[-1])


def col2im(columns, sizes, size):
    """The adjoint of `im2col`."""
    channels = columns.shape[-2] // size**2
    seen = columns.reshape(*columns.shape[:-2], channels, size**2, -1).swapaxes(-1, -2)
    return from_windows(seen, (*columns.shape[:-2], channels, *sizes), size)


def attend(query, key, value, mask=0.0):
    """Attention over (batch, heads, length, size), and the logarithm of the sums of its weights."""
    scores = query @ key.swapaxes(-1, -2) + mask
    sums = np.log(np.exp(scores).sum(-1))
    return np.exp(scores - sums[..., None]) @ value, sums


def attend_backward(gradient, query, key, value, output, sums, mask=0.0):
    """The gradients of query, key and value."""
    weights = np.exp(query @ key.swapaxes(-1, -2) + mask - sums[..., None])
    of_weights = gradient @ value.swapaxes(-1, -2)
    of_scores = weights * (of_weights - (gradient * output).sum(-1, keepdims=True))
    return (
        of_scores @ key,
        of_scores.swapaxes(-1, -2) @ query,
        weights.swapaxes(-1, -2) @ gradient,
    )


def recur(x, state, cells, weight, bias):
    """A recurrence over (steps, batch, size): the output, the last state and the last cells.

    The state adds up a product of the inputs, and the cells, of which they may be none, the states.
    """
    output = state[0] + np.cumsum(x @ weight + bias, 0)
    return [output, output[-1:], *(each + output.sum(0) for each in cells)]


def recur_backward(x, weight, gradient, of_state, of_cells):
    """The gradients of the input, state, cells, weight and bias."""
    each = gradient + sum(of_cells)
    each[-1] += of_state[0]
    sums = np.cumsum(each[::-1], 0)[::-1]
    of_weight = np.einsum("tni,tnh->ih", x, sums)
    return sums @ weight.T, sums[:1], sum(of_cells), of_weight, sums.sum((0, 1))
