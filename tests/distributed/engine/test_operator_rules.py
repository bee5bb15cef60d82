"""Operators that are sharded by rules: the numbers of one device, exact counts of collectives."""

import re
from pathlib import Path

import attrs
import keras
import numpy as np
import pytest
import torch
from torch.nn import functional

import shardcore
from shardcore.adapters.engine import differentiable
from shardcore.adapters.engine.operators import layers, lookups
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.programs import as_arrays, assert_close, distribute, placements
from tests.fallbacks import fallbacks, forget_fallbacks

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "operators.md"
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


def run(case, mesh):
    """The result and gradients, their placements, what was moved, and the fall-backs."""
    rng = np.random.default_rng(0)
    operands = [torch.tensor(rng.normal(size=shape), dtype=torch.float32) for shape in case.shapes]
    if mesh:
        operands = [
            each if spec is None else shardcore.distribute_tensor(each, spec)
            for each, spec in zip(operands, case.specs, strict=True)
        ]
    for each in operands:
        each.requires_grad_()
    forget_fallbacks()
    with count_collectives() as forward:
        result = case.function(*operands, **case.named)
    seed = as_placed(torch.tensor(rng.normal(size=result.shape), dtype=torch.float32), result)
    with count_collectives() as backward:
        gradients = torch.autograd.grad(result, operands, seed)
    found = {str(number): each for number, each in enumerate((result, *gradients))}
    words = [placements(each) for each in (result, *gradients)]
    fell_back = sorted(fallbacks())
    return as_arrays(found), words, dict(forward.calls), dict(backward.calls), fell_back


def as_placed(value, result):
    """`value` sharded as `result` is, replicated where that is pending."""
    if not isinstance(result, ShardedTensor):
        return value
    return differentiable.redistribute(value, result.mesh_layout.reduced, result.engine)


def run_all(rank, cases, mesh):
    if mesh:
        distribute(mesh)
    return {name: run(case, mesh) for name, case in cases.items()}


def compare(cases, mesh):
    """Per case what one device gives, and what each rank gives and reports."""
    (expected,) = run_ranks(run_all, 1, cases, None)
    results = run_ranks(run_all, mesh[0] * mesh[1], cases, mesh)
    return {name: (expected[name][0], [each[name] for each in results]) for name in cases}


def of_each_rank(compared, name):
    """The facts of a case from each rank; its values are those of one device."""
    expected, results = compared[name]
    assert_close([values for values, *_ in results], expected, atol=1e-4)
    return [facts for _, *facts in results]


def on_model(placed):
    """As `placements` says it on a mesh (1, 2)."""
    return [f"R {placement.replace(',', ', ').replace('_', ' ')}" for placement in placed.split()]


@pytest.fixture(scope="module")
def compared():
    return compare(SHARDED | WHOLE, (1, 2))


@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_operand_stays_sharded_and_moves_the_fewest_bytes(compared, name):
    case = SHARDED[name]
    for each in of_each_rank(compared, name):
        assert each == [on_model(case.placed), case.moved, case.moved_back, []]


@pytest.mark.parametrize("name", WHOLE)
def test_an_operator_that_cannot_be_sharded_runs_on_full_operands_and_warns(compared, name):
    for words, _, _, fell_back in of_each_rank(compared, name):
        assert words == on_model(WHOLE[name].placed)
        assert len(fell_back) == 2, fell_back  # forward and backward


def test_two_axes_shard_two_factors():
    cases = {
        "two dims": convolution([("data", N, N, N), ("model", N, N, N), N], "S(0) S(1)"),
        "batch by both": convolution([(("data", "model"), N, N, N), N, N], "S(0) S(0)"),
        "unbind": Case(rows, [(4, 4)], [("data", "model")], "S(0) S(0)", MOVED),
    }
    compared = compare(cases, (2, 2))
    for name, case in cases.items():
        for words, moved, _, fell_back in of_each_rank(compared, name):
            assert (words[0], moved) == (case.placed, case.moved)
            assert fell_back == [], name


def test_frames_of_rows_stay_sharded():
    """As `torch.stft` takes them; frames that go beyond a row run on full operands."""

    def program(rank):
        distribute((2, 1))
        found = []
        for rows, frames in ((3, 5), (2, 8)):
            x = shardcore.distribute_tensor(torch.arange(36.0).reshape(3, 12), ("data", None))
            forget_fallbacks()
            with count_collectives() as traffic:
                result = x.as_strided((rows, frames, 4), (12, 2, 1))
            facts = placements(result), dict(traffic.calls), list(fallbacks())
            found.append((result.full_tensor().numpy(), *facts))
        return found

    numbers = np.arange(36, dtype="float32")
    for within, beyond in run_ranks(program, 2):
        for rows, frames, found in ((3, 5, within[0]), (2, 8, beyond[0])):
            places = [
                [[12 * row + 2 * at + n for n in range(4)] for at in range(frames)]
                for row in range(rows)
            ]
            np.testing.assert_array_equal(found, numbers[places])
        assert within[1:] == ("S(0) R", {}, [])
        assert beyond[1:] == ("R R", {"all_gather": 1}, ["aten.as_strided.default"])


def rows(x):
    """The sum of the first two rows, weighted."""
    first, second, *_ = torch.unbind(x)
    return first * 2 + second * 3


def test_a_convolutional_model_moves_no_kernel():
    """Three kernels, all sharded by their last dim: activations meet them whole."""

    def train(rank, mesh):
        if mesh:
            distribute(mesh, {".*kernel": (N, N, N, "model")})
        keras.utils.set_random_seed(1)
        layers = [
            keras.layers.Conv2D(4, 3, activation="relu6"),
            keras.layers.MaxPooling2D(2),
            keras.layers.ZeroPadding2D(1),
            keras.layers.Conv2D(6, 3),
            keras.layers.Conv2DTranspose(2, 2),
            keras.layers.GlobalAveragePooling2D(),
        ]
        model = keras.Sequential([keras.Input((8, 8, 2)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        rng = np.random.default_rng(0)
        data = rng.normal(size=(5, 8, 8, 2)), rng.normal(size=(5, 2))
        model.train_on_batch(*data)
        forget_fallbacks()
        with count_collectives() as traffic:
            loss = model.train_on_batch(*data)
        return float(loss), model.get_weights(), dict(traffic.calls), dict(fallbacks())

    ((loss, weights, _, _),) = run_ranks(train, 1, None)
    for own_loss, own_weights, calls, fell_back in run_ranks(train, 2, (1, 2)):
        assert own_loss == pytest.approx(loss, abs=1e-5)
        for own, one in zip(own_weights, weights, strict=True):
            np.testing.assert_allclose(own, one, atol=1e-5)
        # The inputs of the convolutions, found again on the way back; two gradients of them, of
        # which one comes back in the layout of its input.
        moved = {"all_gather": 3, "all_reduce": 1, "reduce_scatter": 1}
        assert (calls, fell_back) == (moved, {})


def test_the_documentation_names_every_operator():
    text = DOCS.read_text()
    operators = {*layers.PLANNERS, *lookups.HANDLERS}
    names = {str(each).removeprefix("aten.").partition(".")[0] for each in operators}
    plain = {re.sub(r"([123]d)?(_with_indices)?(_backward)?$", "", name) for name in names}
    assert not [name for name in plain if name not in text]
