"""Softmax and losses of classes that are sharded: the classes stay where they are."""

import itertools

import keras
import pytest
import torch
from torch.nn import functional

import shardcore
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.programs import distribute

# Keras' device may be a GPU, where torch makes no tensors by itself.
here = keras.ops.convert_to_tensor
SHAPES, REDUCTIONS = [(6, 5), (4, 7, 3)], ["none", "mean", "sum"]
IGNORED = -100


def sharded(value, spec):
    layout = keras.distribution.TensorLayout(spec, keras.distribution.distribution().device_mesh)
    return shardcore.distribute_tensor(value.clone(), layout).detach().requires_grad_()


def beside_one_device(function, value, *specs):
    """The result and the gradient of `function`, of each way to shard, beside those of one."""
    whole = here(value).clone().requires_grad_()
    expected = function(whole)
    upstream = here(torch.rand(expected.shape, generator=torch.Generator().manual_seed(1)))
    expected.backward(upstream)
    for spec in specs:
        own = sharded(value, spec)
        with count_collectives() as traffic:
            found = function(own)
            found.backward(upstream)
        tolerance = 1e-5 if value.dtype is torch.float32 else 2e-2
        for ours, its in ((found.detach(), expected.detach()), (own.grad, whole.grad)):
            torch.testing.assert_close(ours.full_tensor(), its, rtol=tolerance, atol=tolerance)
        assert [str(each) for each in own.grad.placements] == [str(p) for p in own.placements]
        yield dict(traffic.calls)


def losses(rank):
    distribute((1, 2))
    generator = torch.Generator().manual_seed(0)
    cases = itertools.product(SHAPES, REDUCTIONS, [False, True], [torch.float32, torch.bfloat16])
    for shape, reduction, weighted, dtype in cases:
        value = torch.randn(shape, generator=generator).to(dtype)
        target = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
        target[0] = IGNORED
        target = here(target)
        weight = torch.rand(shape[1], generator=generator).to(dtype) if weighted else None
        weight = None if weight is None else here(weight)

        def loss(x, target=target, weight=weight, reduction=reduction):
            return functional.cross_entropy(x, target, weight=weight, reduction=reduction)

        specs = [(None, "model", *[None] * (len(shape) - 2))]
        # The largest, the sum of powers, the sum of the gradient; the weights of the classes.
        counted = weighted and reduction != "none"
        for calls in beside_one_device(loss, value, *specs):
            assert calls == {"all_reduce": 3 + counted}, (shape, reduction, weighted, dtype)


def test_losses_of_sharded_classes():
    run_ranks(losses, 2)


def on_two_axes(rank):
    distribute((2, 2))
    value = torch.randn((6, 5), generator=torch.Generator().manual_seed(0))
    target = here(torch.tensor([0, 1, 2, 3, 4, IGNORED]))
    specs = [("data", "model"), (None, "model")]
    for reduction in ("none", "mean"):
        found = beside_one_device(
            lambda x, reduction=reduction: functional.cross_entropy(x, target, reduction=reduction),
            value,
            *specs,
        )
        # With a sharded batch, the number of samples that count is summed too.
        more = reduction == "mean"
        assert list(found) == [{"all_reduce": 3 + more}, {"all_reduce": 3}]


def test_losses_of_sharded_classes_and_a_sharded_batch():
    run_ranks(on_two_axes, 4)


def softmaxes(rank):
    distribute((1, 2))
    value = torch.randn((4, 5), generator=torch.Generator().manual_seed(0)) * 30
    # The second gradient is a sum of what is given, which every rank has whole here.
    for function, reductions in ((functional.softmax, 3), (functional.log_softmax, 2)):
        (calls,) = beside_one_device(lambda x, f=function: f(x, -1), value, (None, "model"))
        assert calls == {"all_reduce": reductions}
        (calls,) = beside_one_device(lambda x, f=function: f(x, 0), value, (None, "model"))
        assert calls == {}


def test_softmax_along_a_sharded_dim():
    run_ranks(softmaxes, 2)


def no_class(rank):
    distribute((1, 2))
    value = torch.zeros((2, 4))
    found = functional.cross_entropy(
        sharded(value, (None, "model")), here(torch.tensor([1, 4])), reduction="none"
    )
    return found.full_tensor().tolist()


def test_a_class_that_does_not_exist_is_not_a_number():
    with pytest.raises(IndexError):
        functional.cross_entropy(torch.zeros((2, 4)), torch.tensor([1, 4]))
    for first, second in run_ranks(no_class, 2):
        assert first == pytest.approx(1.386294, abs=1e-5)
        assert second != second


ROWS = torch.tensor(
    [
        [1.0, 5.0, 2.0, 5.0, 0.0],  # the first of two
        [-0.0, 0.0, -0.0, 0.0, -0.0],  # equal
        [-3.0, -2.0, -7.0, -1.0, -9.0],
        [0.0, 1.0, float("nan"), 2.0, float("nan")],  # the largest, to torch
        [-torch.inf] * 5,
        [3e38, torch.inf, 1.0, torch.inf, -torch.inf],
    ]
)


# Ways to shard rows of classes on a mesh (2, 2), and the all-reduces of their largest.
SPECS = {
    (None, "model"): 1,
    ("data", "model"): 1,
    (None, ("data", "model")): 2,
    ("data", None): 0,
}


def largest(rank):
    distribute((2, 2))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = here(ROWS).to(dtype)
        values = (rows, rows.flip(1), torch.stack([rows, rows.flip(0)], -1))
        for spec, value, keep in itertools.product(SPECS, values, (False, True)):
            own = sharded(value, spec if value.ndim == 2 else (*spec, None))
            with count_collectives() as traffic:
                places = own.argmax(1, keep)
            torch.testing.assert_close(places.full_tensor(), value.argmax(1, keep))
            reductions = {"all_reduce": SPECS[spec]} if SPECS[spec] else {}
            assert traffic.calls == reductions, (spec, value.shape, keep)
    few = torch.tensor([[2.0], [1.0]])  # all with the first rank
    assert sharded(few, (None, "model")).argmax(-1).full_tensor().tolist() == [0, 0]
    doubles = here(ROWS).double()  # whole: they are larger than the limit
    found = sharded(doubles, (None, "model")).argmax(1).full_tensor()
    torch.testing.assert_close(found, doubles.argmax(1))


def test_the_largest_of_sharded_classes():
    run_ranks(largest, 4)
