"""A partial result of a reduction over a sharded dim is read as on one device."""

import numpy as np
import pytest
import torch
from torch.nn import functional

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.programs import as_arrays, assert_close, distribute, placements

VALUES = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
VALUES[:, 1] = -np.abs(VALUES[:, 1])  # no rank finds one above zero
VALUES[:, 2] = np.abs(VALUES[:, 2])  # each rank does
NORMS = (0, 1, 2, 3, float("inf"), float("-inf"))


def whether_any(x):
    found = {"over rows": (x > 0).any(0), "over all": (x > 0).any(), "dims": (x > 3).any((0, 1))}
    found |= {"kept": (x > 0).any(0, keepdim=True), "of bytes": (x > 0).to(torch.uint8).any(0)}
    found["of a partial sum"] = (x - x.mean(0)).sum(0).round().any()
    numbers = {f"{name}, as a number": each.float().sum() for name, each in found.items()}
    return found | numbers | {"none": 1 - found["over rows"].float()}


def norms(x):
    found = {f"norm {order}": torch.linalg.vector_norm(x, order, dim=0) for order in NORMS}
    found |= {f"norm {order} of all": torch.linalg.vector_norm(x, order) for order in NORMS}
    summed = {f"{name}, summed": each.sum() for name, each in found.items()}
    listed = torch._foreach_norm([x, 2 * x, x.T.contiguous(), x.sum(0)])
    return found | summed | {"no dims": torch.linalg.vector_norm(x, 2, dim=[]), "list": sum(listed)}


def filled(x):
    like = x.sum(0)
    return {
        "empty_like": torch.empty_like(like).fill_(3.0),
        "full_like": torch.full_like(like, 3.0),
        "zeros_like": torch.zeros_like(like) + 1,
        "ones_like": torch.ones_like(like) * 2,
        "new_empty": like.new_empty((4,)).fill_(3.0),
        "new_full": like.new_full((4,), 3.0),
        "of sums": x.sum(0).fill_(3.0),
        "by a tensor": x.sum(0).fill_(x.sum()),
        "of sums, zero": x.sum(0).zero_() + 1,
        "of means": x.mean(0).fill_(3.0),
        "of the largest": x.amax(0).fill_(-3.0),
        "added to": x.sum(0).add_(1.0),
        "integers added to": (x > 0).sum(0).add_(torch.tensor([1, 2, 3, 4])),
        "copied to": x.sum(0).copy_(torch.ones(4)),
        "masked": x.sum(0).masked_fill_(torch.tensor([True, False, True, False]), 5.0),
        "loss of a cosine": functional.cosine_embedding_loss(
            x.T, 2 * x.T.flip(0), torch.ones(4), reduction="none"
        ),
    }


def written(x):
    """A partial sum is written into a plain value, and the other way round."""
    whole, order = torch.linalg.vector_norm(x, 2, dim=0), torch.tensor([2, 0, 3, 1])
    mask = torch.tensor([True, False, True, False])
    return {
        "rows added": whole.clone().index_add_(0, order, x.sum(0)),
        "rows copied": whole.clone().index_copy_(0, order, x.sum(0)),
        "rows scattered": x.sum(0).scatter_add_(0, order, whole),
        "masked by a sum": whole.clone().masked_fill_(mask, x.sum()),
        "sums masked by a sum": x.sum(0).masked_fill_(mask, x.sum()),
        "a product added": whole.clone().addmv_(x.T @ x, x.sum(0)),
    }


def over_zero(x):
    """The sums of both halves are of both signs."""
    signed = x * torch.tensor([[1.0]] * 3 + [[-1.0]] * 3)
    return {"sum": signed.sum(0) / 0, "mean": torch.div(signed.mean(0), 0.0)}


def drawn(x):
    torch.manual_seed(1)
    written, row = x.clone(), x.clone()
    kept = row[1]
    row[0].uniform_()
    return {
        "like a sum": torch.empty_like(x.sum(0)).uniform_(),
        "a sum": x.sum(0).normal_(),
        "a reshape": x.reshape(-1).clone().uniform_(),
        "integers": torch.empty_like(x).random_(0, 100),
        "by probabilities": torch.empty_like(x).bernoulli_(torch.full((6, 4), 0.3)),
        "slopes": functional.rrelu(x, training=True),
        "slopes in place": functional.rrelu(written, training=True, inplace=True),
        "a row": row,
        "another row": kept,
    }


def half(x):
    """The squares of the deviations add up to more than float16 holds."""
    return {
        "variance": torch.var((150 * x).half(), 0),
        "deviation": torch.std((300 * x).half(), 0),
        "mean": torch.var_mean((300 * x).bfloat16(), 0)[1].float(),
    }


def strided(x):
    flat = x.reshape(6, 2, 2).transpose(0, 1).reshape(12, 2)
    return {"largest": flat.argmax(0), "variance": flat.var(0), "any": (flat > 0).any(0).float()}


def rows_read_often(x):
    rows = torch.tensor([[0, 1, 1], [1, 1, 2], [3, 3, 3], [0, 0, 2]])
    if isinstance(x, torch.distributed.tensor.DTensor):
        rows = shardcore.distribute_tensor(rows, ("data", None))
    table = x.detach().clone().requires_grad_()
    (functional.embedding(rows, table, scale_grad_by_freq=True) ** 2).sum().backward()
    return {"gradient": table.grad}


def losses(x):
    """Means over samples of which some are ignored, all on one rank, and classes that weigh."""
    classes = torch.tensor([0, 1, 2, -100, -100, 3])
    pixels = torch.stack([classes, classes.flip(0)], 1)
    images = torch.stack([x, 2 * x], 2)
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0])
    found = {}
    for name, scores, target in (("rows", x, classes), ("pixels", images, pixels)):
        for reduction in ("mean", "sum", "none"):
            for weights in (None, weight):
                key = f"{name} {reduction} {weights is None}"
                own = scores.detach().clone().requires_grad_()
                loss = functional.cross_entropy(own, target, weights, reduction=reduction)
                (loss * loss).sum().backward()
                found |= {key: loss, f"{key}, gradient": own.grad}
    return found


GROUPS = [
    whether_any,
    norms,
    filled,
    written,
    over_zero,
    drawn,
    half,
    strided,
    rows_read_often,
    losses,
]


def all_groups(rank, mesh, spec):
    if mesh:
        distribute(mesh)
    found = {}
    for group in GROUPS:
        x = torch.tensor(VALUES)
        results = group(shardcore.distribute_tensor(x, spec) if mesh else x)
        found |= {f"{group.__name__}: {name}": each for name, each in results.items()}
    return as_arrays(found)


@pytest.fixture(scope="module")
def reference():
    (values,) = run_ranks(all_groups, 1, None, None)
    return values


@pytest.mark.parametrize(
    ("mesh", "spec"), [((2, 1), ("data", None)), ((2, 2), ("model", "data"))], ids=["one", "two"]
)
def test_a_pending_sum_is_read_as_on_one_device(reference, mesh, spec):
    results = run_ranks(all_groups, mesh[0] * mesh[1], mesh, spec, timeout=120)
    assert_close(results, reference, atol=2e-5)


def test_norms_of_a_list_are_reduced_together():
    def program(rank):
        distribute((2, 1))
        x = shardcore.distribute_tensor(torch.tensor(VALUES), ("data", None))
        with shardcore.testing.count_collectives() as moved:
            found = torch._foreach_norm([x, 2 * x, 3 * x])
        return dict(moved.calls), {placements(each) for each in found}

    assert run_ranks(program, 2) == [({"all_reduce": 1}, {"R R"})] * 2
