"""Operators on sharded tensors, in all layouts over two and three ranks, beside plain torch."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from shardcore.adapters.engine.dtensors import DTensors
from shardcore.adapters.engine.library import open_engine
from shardcore.adapters.engine.local_shards import LocalShards
from shardcore.adapters.engine.redistribution import local_shard
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import Segments
from shardcore.ports.world import World
from shardcore.testing import run_ranks

aten = torch.ops.aten
VALUES = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, -100, 2, 1, 0])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])
PLACES = torch.tensor([[0, 1], [5, 3]])


def written(write):
    """Applies `write` to a copy of a tensor."""

    def changed(x):
        x = x.clone()
        write(x)
        return x * 1

    return changed


def gradient_of(function, x):
    x = x.detach().requires_grad_()
    (function(x) ** 2).sum().backward()
    return x.grad


def pooled(pool, x, *args, **kwargs):
    return gradient_of(lambda y: pool(y[None], *args, **kwargs), x)


CASES = {
    # random: the values of one device
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "dropout": lambda x: F.dropout(x, 0.5),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 2),
    "randn_like": torch.randn_like,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "uniform_": written(lambda x: x.uniform_()),
    "uniform_ of a row": written(lambda x: x[0].uniform_()),
    # computed with what a sum over ranks would leave pending
    "any": lambda x: (x > 0).any(0).float().sum(),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=0).sum(),
    "norm of absolutes": lambda x: torch.linalg.vector_norm(x, 1, dim=0).sum(),
    "norms of a list": lambda x: torch.stack(torch._foreach_norm([x, x * 2])),
    "filled": lambda x: torch.empty_like(x.sum(0)).fill_(3.0),
    "one minus": lambda x: 1 - x.sum(0),
    "over zero": lambda x: x.sum(0) / 0,
    "number over": lambda x: torch.ops.aten.div.Tensor(2.0, x.sum(0)),
    "number times": lambda x: torch.ops.aten.mul.Tensor(2.0, x.sum(0)),
    "times infinity": lambda x: x.sum(0) * float("inf"),
    "numbers beside a sum": lambda x: (
        (torch.tensor(4.0) - x.sum() * torch.tensor(3.0) - 2.0) / torch.tensor(5.0) + x.sum()
    ),
    "a number for a sum": lambda x: torch.stack(
        [torch.where(torch.tensor(chosen), x.sum(), torch.tensor(7.0)) for chosen in (True, False)]
        + [torch.where(x.sum() > 0, torch.tensor(1.0), x.sum())]
        + [torch.where(x.sum().bool(), x.sum(), x.mean())]
    ),
    "of integers": lambda x: (x * 10).int().sum(0),
    # means and variances of the whole
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True),
    "std": lambda x: x.std(0),
    "var of half": lambda x: (x.half() * 100).var(),
    # losses
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x.flip(1), torch.ones(6)),
    "cross_entropy, one ignored": lambda x: F.cross_entropy(x, CLASSES),
    "cross_entropy, weighted": lambda x: F.cross_entropy(x, CLASSES.abs() % 3, weight=WEIGHTS),
    "cross_entropy, classes in rows": lambda x: gradient_of(
        lambda y: F.cross_entropy(y.t(), PLACES[1], weight=x.detach()[:, 0].abs()), x[:, :2]
    ),
    "kl_div": lambda x: F.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean"),
    "mse_loss": lambda x: F.mse_loss(x, torch.ones_like(x)),
    # by elements, with custom gradients
    "activations": lambda x: gradient_of(
        lambda y: F.elu(y) + F.leaky_relu(y) * F.softplus(y) + F.hardswish(y), x
    ),
    # along dims
    "argmax": lambda x: x.argmax(0),
    "any over dims": lambda x: (x > 1).any((0,)),
    "any over no dims": lambda x: (x > 1).any(()),
    "all over dims": lambda x: (x > -9).all((0, 1)),
    "cumsum": lambda x: gradient_of(lambda y: y.cumsum(0) * y.cumsum(-1), x),
    "cumsum, counted": lambda x: (x > 0).cumsum(0),
    "group_norm": lambda x: F.group_norm(x.view(6, 3, 1), 3),
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "logsumexp": lambda x: x.logsumexp(0),
    "logsumexp, infinite": lambda x: torch.where(x > 0, -torch.inf, x).logsumexp((0, 1), True),
    "how many": lambda x: (x > 0).sum(0),
    "how many in all": lambda x: (x > 0).sum(),
    "how many, kept": lambda x: (x > 0).sum((0, 1), True),
    "max": lambda x: x.max(),
    "median": lambda x: x.median(0).values,
    "prod": lambda x: x.prod(),
    "topk": lambda x: x.topk(2, 0).values,
    # windows, as they are sharded and as they are not
    "max_pool": lambda x: pooled(F.max_pool2d, x, 2),
    "max_pool, indices": lambda x: torch.cat(
        [
            i.flatten()
            for w in (1, 2, 3, (2, 3))
            for i in F.max_pool2d(x[None], w, return_indices=True)[1:]
        ]
    ),
    "max_pool, overlapping": lambda x: pooled(F.max_pool2d, x, 2, 1),
    "max_pool, padded": lambda x: pooled(F.max_pool2d, x, 2, padding=1),
    "max_pool3d": lambda x: pooled(lambda y: F.max_pool3d(y.view(1, 1, 6, 3, 1), (3, 1, 1)), x),
    "adaptive_max_pool3d, channels last": lambda x: gradient_of(
        lambda y: F.adaptive_max_pool3d(y.view(1, 1, 3, 2, 3).permute(0, 4, 1, 2, 3), (1, 2, 1)), x
    ),
    "avg_pool": lambda x: pooled(F.avg_pool2d, x, (3, 1)),
    "avg_pool, one left out": lambda x: pooled(F.avg_pool2d, x, 2),
    # parts of a dim that is sharded, which begin elsewhere
    "rows and the next": lambda x: gradient_of(lambda y: y[1:] * y[:-1].exp(), x),
    "thirds of the rows": lambda x: gradient_of(lambda y: torch.stack(y.split(2)).prod(0), x),
    "padded": lambda x: gradient_of(lambda y: F.pad(y, (1, 0, 1, 2), value=3.0).exp(), x),
    "padded by more than a part": lambda x: F.pad(x, (0, 0, 0, 20)) + F.pad(x, (0, 0, 20, 0)),
    "padded less than nothing": lambda x: gradient_of(lambda y: F.pad(y.exp(), (0, 0, -2, 3)), x),
    "padded to no row": lambda x: torch.cat([x, F.pad(x, (0, 0, -4, -2))]),
    "a sum, cropped or padded": lambda x: torch.cat(
        [F.pad(x.sum(0), (-1, 0)).exp(), F.pad(x.sum(0), (0, 1), value=2.0)]
    ),
    "cat": lambda x: torch.cat([x, x.exp()]) + torch.cat([x.sum(0, True)] * 12),
    "stack": lambda x: torch.stack([x.sum(0), x.mean(0)]),
    "slices without an end": lambda x: torch.cat([aten.slice(x, 0, n) for n in (0, 4, 6)]),
    "empty slices": lambda x: gradient_of(
        lambda y: torch.cat([y, y[6:]]) + y[:, 3:].sum(1, True), x
    ),
    "bincount": lambda x: torch.bincount(CLASSES.abs() + 0 * x[:, 0].long()),
    "bincount of rows": lambda x: torch.bincount((x[:, 0] * 5).long().abs(), minlength=3),
    "weighted bincount": lambda x: torch.bincount((x[:, 0] * 9).long().abs(), x[:, 1]),
    "bincount of one column": lambda x: torch.bincount((x[:, :1].reshape(-1) * 5).long().abs()),
    # looked up
    "by a mask": lambda x: x[x > 0],
    "by numbers": lambda x: x[torch.tensor([5, 0, 3])],
    "embedding": lambda x: F.embedding(PLACES, x),
    "embedding_bag": lambda x: F.embedding_bag(PLACES, x),
    "scatter": lambda x: x.scatter(0, (x > 0).long(), x * 2),
    "scatter a number": lambda x: x.scatter(1, (x[:, :2] > 0).long(), 7.0),
    "scatter_add": lambda x: x.scatter_add(0, torch.arange(6)[:, None] % 3 * (x > 9).long(), x),
    # written
    "between rows": written(lambda x: x[1:-1].mul_(3.0)),
    "index_put_": written(lambda x: x.__setitem__(torch.tensor([0, 5]), 1.0)),
    "masked_fill": lambda x: x.masked_fill(x > 0, torch.tensor(9.0)),
    "masked_fill_": written(lambda x: x.masked_fill_(x > 0, 9.0)),
    "masked_fill_ by rows": written(lambda x: x.masked_fill_(x.sum(1, True) > 0, 9.0)),
    "masked_fill_ with a tensor": written(lambda x: x.masked_fill_(x > 0, torch.tensor(9.0))),
    "t_": lambda x: x.clone().t_().sum(0),
    "unsqueeze_": written(lambda x: x.unsqueeze_(0)),
    "transpose_ and squeeze_": lambda x: torch.view_as_real(
        torch.stft(x.sum(1), 4, 2, window=torch.ones(4), center=False, return_complex=True)
    ),
}


def compare(rank, ranks, kind):
    """The differences from plain torch, by case and layout."""
    mesh = Mesh((ranks,), ("data",))
    world = World(mesh, tuple(range(ranks)), rank, "cpu")
    tensors = open_engine(world, kind.over, "compute", "per_use", {})
    layouts = [Layout(mesh, spec) for spec in (("data", None), (None, "data"))]
    pieces = Layout(mesh, ("data", None), blocks=(Segments(2), 1))
    wrong = {}
    for layout in [*layouts, pieces, Layout(mesh, (None, None), {"data": "sum"})]:
        for name, function in CASES.items():
            torch.manual_seed(5)
            expected = function(VALUES.clone())
            torch.manual_seed(5)
            local = part(layout, rank, tensors.engine)
            found = tensors.full_tensor(function(tensors.from_local(local, layout, (6, 3))))
            same = found.shape == expected.shape and found.dtype == expected.dtype
            if not same or not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
                wrong[name, str(layout)] = found
    return wrong


def part(layout, rank, engine):
    """A rank's part of the values; of a partial sum twice, minus once, and nothing more."""
    factor = {0: 2, 1: -1}.get(rank, 0) if layout.partial else 1
    return local_shard(VALUES, layout.reduced, engine) * factor


@pytest.mark.parametrize(("ranks", "kind"), [(2, LocalShards), (3, DTensors)])
def test_operators_give_what_they_give_on_plain_tensors(ranks, kind):
    assert run_ranks(compare, ranks, ranks, kind) == [{}] * ranks


def counted(rank, weight):
    """The fall-backs of a view that cuts a sharded dim into others, and its values."""
    mesh = Mesh((4,), ("model",))
    world = World(mesh, (0, 1, 2, 3), rank, "cpu")
    tensors = open_engine(world, DTensors.over, "compute", "per_use", {})
    values = torch.arange(8.0)
    part = values[2 * rank : 2 * rank + 2]
    sharded = tensors.engine.sharded(part, Layout(mesh, ("model",)), (8,), weight=weight)
    return tensors.full_tensor(sharded.view(2, 4) * 1).tolist(), dict(tensors.engine.fallbacks)


@pytest.mark.parametrize("weight", [True, False])
def test_a_weight_that_is_gathered_for_a_view_is_no_fall_back(weight):
    """Ranks repeat no work for it. Four ranks cannot shard two rows."""
    rows = torch.arange(8.0).view(2, 4).tolist()
    falls_back = {} if weight else {"aten.view.default": 1}
    assert run_ranks(counted, 4, weight) == [(rows, falls_back)] * 4


def counts_with_weights(rank):
    """A weighted count of one number, of which the second rank has none."""
    mesh = Mesh((2,), ("data",))
    world = World(mesh, (0, 1), rank, "cpu")
    tensors = open_engine(world, DTensors.over, "compute", "per_use", {})
    layout = Layout(mesh, ("data",))
    numbers, weights = (
        tensors.from_local(each[: 1 - rank], layout, (1,)) for each in (PLACES[1, 1:], WEIGHTS[1:2])
    )
    found = tensors.full_tensor(torch.bincount(numbers, weights))
    return found.tolist(), found.dtype


def test_a_rank_without_a_number_counts_with_the_others():
    """torch counts no numbers in integers, whatever the weights are."""
    assert run_ranks(counts_with_weights, 2) == [([0.0, 0.0, 0.0, 2.0], torch.float32)] * 2
