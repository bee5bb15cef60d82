"""Calls of operators: the operands, how they are placed, and which collectives they take."""

import attrs
import torch
from torch.nn import functional

N = None
IMAGES, KERNEL, BIAS = (5, 4, 6, 6), (6, 4, 3, 3), (6,)
BATCH, CHANNELS = ("model", N, N, N), (N, "model", N, N)


@attrs.frozen
class Case:
    """A call, how its operands are sharded, and what is to come of it.

    Args:
        function: Called with the operands, which are of `shapes`, and `named`.
        shapes: The shapes of the operands.
        specs: How each is sharded; None for a plain tensor.
        placed: The placements of the result and of the gradients, of the axis "model".
        moved: The collectives of the call.
        moved_back: The collectives of the backward pass.
        named: More arguments.
    """

    function: object
    shapes: list
    specs: list
    placed: str
    moved: dict = attrs.field(factory=dict)
    moved_back: dict = attrs.field(factory=dict)
    named: dict = attrs.field(factory=dict)


def convolution(specs, placed, *, shapes=(IMAGES, KERNEL, BIAS), function=None, moves=(), **named):
    """The case of a convolution, which moves nothing unless it is said."""
    return Case(function or functional.conv2d, shapes, specs, placed, *moves, named=named)


def one(function, shape, spec, placed, *numbers, moves=({}, {}), **named):
    """The case of a function of one tensor."""
    return Case(
        lambda x, **named: function(x, *numbers, **named), [shape], [spec], placed, *moves, named
    )


def columns(x):
    """The third and the fourth column."""
    return x[..., 2:4]


def largest(x, count):
    """The largest values of each row."""
    return x.topk(count).values


GATHERED = {"all_gather": 1}
MOVED = {"all_to_all": 1}
CONVOLUTIONS = {
    "batch, an image a rank, as Keras has them": convolution(
        [BATCH, N, N],
        "S(0) S(0) P(sum) P(sum)",
        shapes=((2, 6, 6, 4), (3, 3, 4, 1), (1,)),
        function=lambda x, kernel, bias: functional.conv2d(
            x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1), bias
        ),
    ),
    "batch, uneven": convolution([BATCH, N, N], "S(0) S(0) P(sum) P(sum)"),
    "out": convolution([N, BATCH, ("model",)], "S(1) P(sum) S(0) S(0)"),
    "out, bias whole": convolution([N, BATCH, N], "S(1) P(sum) S(0) S(0)"),
    "out, uneven": convolution(
        [N, BATCH, N], "S(1) P(sum) S(0) S(0)", shapes=(IMAGES, (5, 4, 3, 3), (5,))
    ),
    "in": convolution([N, CHANNELS, N], "P(sum) S(1) S(1) R"),
    "in, sharded input": convolution([CHANNELS, CHANNELS, N], "P(sum) S(1) S(1) R"),
    "in, then out": convolution(
        [CHANNELS, BATCH, N], "S(1) P(sum) S(0) S(0)", moves=(GATHERED, {})
    ),
    "strided, dilated": convolution(
        [N, BATCH, N], "S(1) P(sum) S(0) S(0)", stride=2, dilation=2, padding=1
    ),
    "depthwise": convolution(
        [CHANNELS, BATCH, N], "S(1) S(1) S(0) S(0)", shapes=(IMAGES, (8, 1, 3, 3), (8,)), groups=4
    ),
    "depthwise, uneven": convolution(
        [N, BATCH, N], "S(1) S(1) S(0) S(0)", shapes=((2, 3, 6, 6), (3, 1, 3, 3), (3,)), groups=3
    ),
    "depthwise, reshaped": convolution(
        [N, ("model", N, N, N, N), N],
        "S(1) S(1) S(0) S(0)",
        shapes=(IMAGES, (4, 2, 1, 3, 3), (8,)),
        function=lambda x, kernel, bias: functional.conv2d(x, kernel.flatten(0, 1), bias, groups=4),
    ),
    "groups": convolution(
        [CHANNELS, N, N], "S(1) S(1) S(0) S(0)", shapes=(IMAGES, (6, 2, 3, 3), (6,)), groups=2
    ),
    # Each group has one channel, and the last rank one group.
    "groups, uneven": convolution(
        [CHANNELS, N, N],
        "S(1,block=2) S(1) S(0,block=2) S(0,block=2)",
        shapes=((2, 3, 6, 6), (6, 1, 3, 3), BIAS),
        groups=3,
    ),
    "transposed, out": convolution(
        [N, CHANNELS, N],
        "S(1) P(sum) S(1) S(0)",
        shapes=(IMAGES, (4, 6, 3, 3), BIAS),
        function=functional.conv_transpose2d,
        stride=2,
    ),
    "transposed, in": convolution(
        [N, BATCH, N],
        "P(sum) S(1) S(0) R",
        shapes=(IMAGES, (4, 6, 3, 3), BIAS),
        function=functional.conv_transpose2d,
    ),
    "1d": convolution(
        [N, ("model", N, N), N],
        "S(1) P(sum) S(0) S(0)",
        shapes=((2, 4, 7), (6, 4, 3), BIAS),
        function=functional.conv1d,
    ),
    "3d": convolution(
        [N, ("model", N, N, N, N), N],
        "S(1) P(sum) S(0) S(0)",
        shapes=((2, 2, 4, 4, 4), (6, 2, 2, 2, 2), BIAS),
        function=functional.conv3d,
    ),
}


VOLUMES, ROWS = (3, 4, 4, 5, 6), (3, 4, 7)
POOLS_AND_PADS = {
    "max pool 1d": one(functional.max_pool1d, ROWS, BATCH[:3], "S(0) S(0)", 2),
    "max pool 2d": one(functional.max_pool2d, IMAGES, BATCH, "S(0) S(0)", 3, 2, padding=1),
    "max pool 2d, channels": one(functional.max_pool2d, IMAGES, CHANNELS, "S(1) S(1)", 2),
    "max pool 3d": one(functional.max_pool3d, VOLUMES, (*BATCH, N), "S(0) S(0)", 2),
    "average pool 2d": one(functional.avg_pool2d, IMAGES, BATCH, "S(0) S(0)", 2),
    "average pool 3d": one(functional.avg_pool3d, VOLUMES, (*CHANNELS, N), "S(1) S(1)", 2),
    "adaptive average 2d": one(functional.adaptive_avg_pool2d, IMAGES, BATCH, "S(0) S(0)", 4),
    "adaptive average 3d": one(
        functional.adaptive_avg_pool3d, VOLUMES, (*BATCH, N), "S(0) S(0)", 3
    ),
    "adaptive max 2d": one(functional.adaptive_max_pool2d, IMAGES, BATCH, "S(0) S(0)", 4),
    "adaptive max 3d": one(functional.adaptive_max_pool3d, VOLUMES, (*BATCH, N), "S(0) S(0)", 3),
    "zeros": one(functional.pad, IMAGES, BATCH, "S(0) S(0)", (1, 2, 0, 1)),
    "reflection 1d": one(functional.pad, ROWS, BATCH[:3], "S(0) S(0)", (1, 2), mode="reflect"),
    "reflection 2d": one(functional.pad, IMAGES, CHANNELS, "S(1) S(1)", [1] * 4, mode="reflect"),
    "replication 2d": one(functional.pad, IMAGES, BATCH, "S(0) S(0)", [1] * 4, mode="replicate"),
    "replication 3d": one(
        functional.pad, VOLUMES, (*BATCH, N), "S(0) S(0)", [1] * 6, mode="replicate"
    ),
    "upsample": one(
        functional.interpolate, IMAGES, CHANNELS, "S(1) S(1)", scale_factor=2, mode="bilinear"
    ),
    "unfold": one(functional.unfold, IMAGES, CHANNELS, "S(1) S(1)", 2),
    "fold": one(functional.fold, (5, 12, 12), BATCH[:3], "S(0) S(0)", (4, 5), 2),
    "relu6": one(functional.relu6, IMAGES, BATCH, "S(0) S(0)"),
    "hard sigmoid": one(functional.hardsigmoid, IMAGES, CHANNELS, "S(1) S(1)"),
    "hard swish": one(functional.hardswish, IMAGES, CHANNELS, "S(1) S(1)"),
}


def transformed(function, spec=BATCH[:3], placed="S(0) S(0)", moves=({}, {})):
    """The case of rows that a function of complex numbers transforms."""

    def call(x):
        return torch.view_as_real(function(torch.complex(x, 2 * x)))

    return one(call, ROWS, spec, placed, moves=moves)


TRANSFORMS = {
    "complex numbers": transformed(lambda x: x * x),
    "transform": transformed(torch.fft.fft),
    "transform of planes": transformed(torch.fft.fft2),
    "inverse transform": transformed(torch.fft.ifft),
    "transform to real numbers": one(
        lambda x: torch.fft.irfft(torch.view_as_complex(x)), (3, 5, 2), BATCH[:3], "S(0) S(0)"
    ),
    "transform of sharded rows": transformed(
        torch.fft.fft, (N, N, "model"), "S(1) S(1)", moves=(MOVED, {})
    ),
    "square of a sum": transformed(
        lambda x: x.sum(0).square(), placed="R R", moves=({"all_reduce": 1}, {})
    ),
    "frames": transformed(lambda x: torch.fft.fft(x.unfold(-1, 4, 2))),
}


def of_classes(reduction, spec, placed, *, shape=(5, 4), moves=({}, {}), weight=None):
    """The case of a loss of classes, of which the first rank has more that count."""
    target = torch.arange(shape[0]).remainder(shape[1])
    target[3:] = -100
    target = target.reshape(-1, *[1] * len(shape[2:])).expand(shape[0], *shape[2:])
    return Case(
        lambda x: functional.nll_loss(x, target, weight, reduction=reduction),
        [shape],
        [spec],
        placed,
        *moves,
    )


# The weights of all samples, four bytes, are summed at once: the gradient is divided by them.
SUMMED = {"all_reduce": 1}, {}
LOSSES = {
    "loss, mean": of_classes("mean", BATCH[:2], "P(sum) S(0)", moves=SUMMED),
    "loss, sum": of_classes("sum", BATCH[:2], "P(sum) S(0)", moves=SUMMED),
    "loss, each": of_classes("none", BATCH[:2], "S(0) S(0)"),
    "loss, weighted": of_classes(
        "mean", BATCH[:2], "P(sum) S(0)", moves=SUMMED, weight=torch.tensor([1.0, 2.0, 0.5, 3.0])
    ),
    "loss over sharded classes": of_classes("mean", CHANNELS[:2], "P(sum) S(1)", moves=({}, {})),
    "loss of pixels": of_classes("mean", BATCH, "P(sum) S(0)", shape=(5, 4, 2, 3), moves=SUMMED),
    "loss of rows of pixels": of_classes(
        "mean", (N, N, "model", N), "P(sum) S(2)", shape=(5, 4, 2, 3), moves=SUMMED
    ),
}


def of_elements(loss, reduction, placed="P(sum) S(0)", **named):
    """The case of a loss that compares five rows, on two ranks, with a plain target."""
    target = torch.linspace(0.1, 0.9, 20).reshape(5, 4)
    return Case(
        lambda x: loss(x.sigmoid(), target, reduction=reduction, **named),
        [(5, 4)],
        [BATCH[:2]],
        placed,
    )


LOSSES |= {
    "binary loss, each": of_elements(functional.binary_cross_entropy, "none", "S(0) S(0)"),
    "binary loss, mean": of_elements(functional.binary_cross_entropy, "mean"),
    "binary loss, weighted": of_elements(
        functional.binary_cross_entropy, "sum", weight=torch.tensor([1.0, 2.0, 0.5, 3.0])
    ),
    "binary loss of logits": of_elements(
        functional.binary_cross_entropy_with_logits, "mean", pos_weight=torch.arange(1.0, 5.0)
    ),
    "squares, mean": of_elements(functional.mse_loss, "mean"),
    "squares, sum": of_elements(functional.mse_loss, "sum"),
    "Huber": of_elements(functional.huber_loss, "mean", delta=0.2),
    "smooth distance": of_elements(functional.smooth_l1_loss, "mean", beta=0.2),
    "triplets": of_elements(
        lambda x, target, **named: functional.triplet_margin_loss(x, target, x + target, **named),
        "mean",
    ),
    "soft margin": of_elements(functional.soft_margin_loss, "mean"),
}


def put(spec, placed, *, accumulate, moves=({}, {})):
    """The case of values that are put into rows of a tensor of ones, two of them into one row."""
    places = torch.tensor([3, 1, 0, -1, 2])

    def function(values):
        return torch.index_put(torch.ones(4, 4), (places,), values, accumulate=accumulate)

    return Case(function, [(5, 4)], [spec], placed, *moves)


PUTS = {
    # The places are whole, and so are the values that the gradient has there.
    "put, added rows": put(BATCH[:2], "P(sum) R", accumulate=True),
    "put, added columns": put(CHANNELS[:2], "S(1) S(1)", accumulate=True),
    "put, columns": put(CHANNELS[:2], "S(1) S(1)", accumulate=False),
}
SHARDED = CONVOLUTIONS | POOLS_AND_PADS | TRANSFORMS | LOSSES | PUTS
# Along the sharded dim: another one is sharded in its place, or the same one in other parts.
OTHER_DIMS = {
    "pool along rows": one(
        functional.max_pool2d, IMAGES, (N, N, "model", N), "S(1) S(1)", 3, 2, moves=(MOVED, {})
    ),
    "pool of a batch of one": one(
        functional.avg_pool2d, (1, *IMAGES[1:]), BATCH, "S(1) S(1)", 3, 2, moves=(MOVED, {})
    ),
    "columns": one(columns, (4, 8), (N, "model"), "S(1) S(1,block=4_x_1)", moves=(MOVED, {})),
    "columns, in no segments": one(
        columns, (3, 4, 7), (N, N, "model"), "S(2) S(2)", moves=(MOVED, MOVED)
    ),
}
SHARDED |= OTHER_DIMS
SHARDED["largest of sharded rows"] = one(largest, (5, 8), ("model", N), "S(0) S(0)", 3)
WHOLE = {
    "rows": one(functional.max_pool2d, IMAGES[1:], (N, "model", N), "R R", 3, 2),
    "a batch of one": one(functional.avg_pool2d, (1, *IMAGES[2:]), BATCH[:3], "R R", 3, 2),
}
