"""Pooling by tiles gives the values, indices and gradients of torch."""

import pytest
import torch
from torch._inductor.decomposition import decompositions

from shardcore.adapters.capture.recording.recorder import Recorder
from shardcore.adapters.torch_private import inductor
from tests.traces import names

POOL = torch.ops.aten.max_pool2d_with_indices.default
GRADIENT = torch.ops.aten.max_pool2d_with_indices_backward.default
OF_INDUCTOR = inductor.decompose_by_tiles(decompositions)
pytestmark = pytest.mark.skipif(not OF_INDUCTOR, reason="this Inductor decomposes no pooling")


def channels_last(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).to(memory_format=torch.channels_last)


def with_ties():
    return channels_last(2, 3, 12, 12).mul(2).round()


def with_odd_values():
    image = with_ties()
    for value in (float("nan"), float("inf"), float("-inf"), -0.0):
        image[torch.rand(image.shape) < 0.2] = value
    return image


TILED = {
    "squares": (channels_last(2, 3, 8, 6), [2, 2], [2, 2]),
    "no stride": (channels_last(2, 3, 8, 6), [2, 2], []),
    "one number": (channels_last(2, 3, 8, 6), [2], [2]),
    "oblong": (channels_last(2, 5, 9, 8), [3, 2], [3, 2]),
    "a rest": (channels_last(2, 3, 11, 7), [2, 3], [2, 3]),
    "rows alone": (channels_last(2, 3, 8, 6), [2, 1], [2, 1]),
    "equals": (with_ties(), [3, 3], [3, 3]),
    "odd values": (with_odd_values(), [2, 2], [2, 2]),
    "half": (channels_last(2, 3, 8, 8, dtype=torch.bfloat16), [2, 2], [2, 2]),
}


@pytest.mark.parametrize("which", TILED)
def test_pooling_by_tiles_is_that_of_torch(which):
    image, size, stride = TILED[which]
    values, indices = POOL(image, size, stride)
    found, places = OF_INDUCTOR[POOL](image, size, stride)
    torch.testing.assert_close(found, values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(places, indices)
    assert found.dtype == values.dtype

    operands = (torch.randn_like(values), image, size, stride, [0, 0], [1, 1], False, indices)
    gradient = OF_INDUCTOR[GRADIENT](*operands)
    assert torch.equal(gradient, GRADIENT(*operands))
    assert gradient.dtype == image.dtype
    assert not is_looked_up(OF_INDUCTOR[GRADIENT], *operands)


def is_looked_up(gradient, *operands):
    """Returns whether the gradient is a `scatter_add` by indices."""
    recorder = Recorder([])
    recorder.run(lambda: gradient(*operands))
    return "scatter_add" in names(recorder.trace)


NOT_TILED = {
    "overlapping": (channels_last(2, 3, 8, 8), [3, 3], [2, 2], [0, 0], [1, 1], False),
    "padded": (channels_last(2, 3, 8, 8), [2, 2], [2, 2], [1, 1], [1, 1], False),
    "dilated": (channels_last(2, 3, 8, 8), [2, 2], [2, 2], [0, 0], [2, 2], False),
    "rounded up": (channels_last(2, 3, 7, 7), [2, 2], [2, 2], [0, 0], [1, 1], True),
    "large tiles": (channels_last(2, 3, 8, 8), [8, 8], [8, 8], [0, 0], [1, 1], False),
    "channels first": (torch.randn(2, 3, 8, 8), [2, 2], [2, 2], [0, 0], [1, 1], False),
    "one image": (torch.randn(3, 8, 8), [2, 2], [2, 2], [0, 0], [1, 1], False),
}


@pytest.mark.parametrize("which", NOT_TILED)
def test_other_pooling_is_left_to_inductor(which):
    image, *how = NOT_TILED[which]
    values, indices = POOL(image, *how)
    gradient = torch.ones_like(values)
    assert is_looked_up(OF_INDUCTOR[GRADIENT], gradient, image, *how, indices)
