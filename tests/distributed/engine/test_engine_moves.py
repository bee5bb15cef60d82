"""The collectives of operators on sharded tensors on two ranks, by kind."""

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from shardcore.adapters.engine.dtensors import DTensors
from shardcore.adapters.engine.library import open_engine
from shardcore.adapters.engine.local_shards import LocalShards
from shardcore.adapters.engine.redistribution import gather_in_pieces
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import Segments
from shardcore.ports.world import World
from shardcore.testing import count_collectives, run_ranks

MESH = Mesh((2,), ("model",))
ROWS, COLUMNS = Layout(MESH, ("model", None)), Layout(MESH, (None, "model"))
PENDING = Layout(MESH, (None, None), {"model": "sum"})
VALUES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def masked(x):
    x = x.clone()
    return x.masked_fill_(x > 0, 9.0)


def pooled(x, pool=F.max_pool2d, size=2):
    """The gradient of a pool."""
    x = x.view(1, 6, 4).detach().requires_grad_()
    found = pool(x, size)
    (found**2).sum().backward()
    return x.grad


CASES = {
    "masked_fill": (lambda x: x.masked_fill(x > 0, torch.tensor(9.0)), ROWS, {}),
    "masked_fill_": (masked, COLUMNS, {}),
    "max pool": (pooled, COLUMNS, {}),
    "max pool of rows": (lambda x: pooled(x, size=(3, 1)), ROWS, {}),
    "average pool": (lambda x: pooled(x, F.avg_pool2d), COLUMNS, {}),
    "joined sums": (lambda x: torch.cat([x, x * 2]).exp(), PENDING, {"all_reduce": (1, 192)}),
    "cropped": (lambda x: x[1:-1], ROWS, {}),
    "padded": (lambda x: F.pad(x, (0, 0, 1, 1)), ROWS, {}),
    "thirds": (lambda x: x.split(2), ROWS, {"all_to_all": (1, 3 * 4 * 4)}),
    "a sum, cropped": (
        lambda x: F.pad(x, (0, 0, -2, -2)).exp(),
        PENDING,
        {"all_reduce": (1, 2 * 4 * 4)},
    ),
    "scatter": (lambda x: x.scatter(1, torch.zeros(6, 4, dtype=torch.int64), x), ROWS, {}),
    "how many": (lambda x: (x > 0).sum(0) + 1, ROWS, {"all_reduce": (1, 4 * 4)}),
    "running sums": (lambda x: x.cumsum(0), ROWS, {"all_gather": (1, 4 * 4)}),
    "logsumexp": (lambda x: x.logsumexp(1), COLUMNS, {"all_reduce": (2, 2 * 6 * 4)}),
}


def moves(rank):
    """The collectives of each case, and the bytes of its operands."""
    world = World(MESH, (0, 1), rank, "cpu")
    tensors = open_engine(world, DTensors.over, "compute", "per_use", {})
    found = {}
    for name, (function, layout, _) in CASES.items():
        x = tensors.from_local(VALUES[layout.slices((6, 4), rank)], layout, (6, 4))
        with count_collectives() as counted:
            function(x)
        found[name] = {k: (calls, counted.operand_bytes[k]) for k, calls in counted.calls.items()}
    return found


def test_operators_move_what_they_must_and_no_more():
    expected = {name: calls for name, (_, _, calls) in CASES.items()}
    assert run_ranks(moves, 2) == [expected] * 2


SQUARE = Mesh((2, 2), ("data", "model"))
SHARDINGS = {
    "rows": Layout(SQUARE, ("model", None)),
    "columns": Layout(SQUARE, (None, "data")),
    "rows and columns": Layout(SQUARE, ("model", "data")),
    "rows over both axes": Layout(SQUARE, (("data", "model"), None)),
    "columns over both axes, the second major": Layout(SQUARE, (None, ("model", "data"))),
    "columns in segments": Layout(SQUARE, ("data", "model"), blocks=(1, Segments(3))),
    "rows in blocks": Layout(SQUARE, ("data", None), blocks=(16, 1)),
}


def test_a_tensor_gathered_in_pieces_is_the_full_tensor():
    processes = (3, 1, 0, 2)
    value = torch.arange(150 * 54, dtype=torch.float32).reshape(150, 54)

    def gathered(process):
        tensors = open_engine(
            World(SQUARE, processes, process, "cpu"), LocalShards.over, "compute", "per_use", {}
        )
        wrong = []
        for name, layout in SHARDINGS.items():
            sharded = tensors.shard(value, layout)
            for at_once in (256, 8192):
                with count_collectives() as counted:
                    found = gather_in_pieces(sharded, at_once)
                pieces = counted.calls["all_gather"]
                if not torch.equal(found, value) or pieces < 2:
                    wrong.append((name, at_once, pieces))
        return wrong

    assert run_ranks(gathered, 4) == [[]] * 4
