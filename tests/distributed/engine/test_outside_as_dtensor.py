"""To code that knows torch only, a variable under strategy `dtensor` is a DTensor."""

import keras
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardcore
from shardcore.domain.errors import LayoutError
from shardcore.testing import run_ranks
from tests.distributed.programs import distribute

VALUE = np.arange(24, dtype="float32").reshape(6, 4)


def variable(spec=("model", None)):
    distribute((1, 2), {"w": spec})
    return keras.Variable(VALUE, name="w").value


def test_it_says_what_a_dtensor_says_and_gives_its_own_kind_back():
    def program(rank):
        w = variable()
        assert isinstance(w, DTensor)
        assert w.placements == (Replicate(), Shard(0))
        columns = w.redistribute(placements=[Replicate(), Shard(1)])
        assert type(columns) is type(w.detach())
        return w.to_local().detach().numpy(), columns.to_local().detach().numpy(), tuple(w.shape)

    for rank, (rows, columns, shape) in enumerate(run_ranks(program, 2)):
        np.testing.assert_array_equal(rows, np.split(VALUE, 2)[rank])
        np.testing.assert_array_equal(columns, np.split(VALUE, 2, axis=1)[rank])
        assert shape == VALUE.shape


def test_gradients_come_back_through_its_methods():
    def program(rank):
        w = variable()
        (w.full_tensor() * torch.tensor(VALUE)).sum().backward()
        full = w.grad.full_tensor().numpy()
        w.grad = None
        (w.to_local() * (rank + 1)).sum().backward()
        return full, w.grad.to_local().numpy()

    for rank, (full, local) in enumerate(run_ranks(program, 2)):
        np.testing.assert_array_equal(full, VALUE)
        np.testing.assert_array_equal(local, np.full((3, 4), rank + 1))


def test_a_plain_dtensor_mixes_with_it():
    def program(rank):
        w = variable().detach()
        plain = DTensor.from_local(torch.ones(6, 2), w.device_mesh, [Replicate(), Shard(1)])
        assert type(plain) is DTensor
        return (w + plain).full_tensor().numpy(), (plain.T @ w).full_tensor().numpy()

    for total, product in run_ranks(program, 2):
        np.testing.assert_array_equal(total, VALUE + 1)
        np.testing.assert_array_equal(product, np.ones((4, 6)) @ VALUE)


def test_a_checkpoint_of_torch_saves_and_loads_it_in_another_layout(tmp_path):
    def save(rank):
        dcp.save({"w": variable().detach()}, checkpoint_id=tmp_path)

    def load(rank):
        w = variable((None, "model"))
        found = {"w": torch.zeros_like(w.detach())}
        dcp.load(found, checkpoint_id=tmp_path)
        return found["w"].to_local().numpy()

    run_ranks(save, 2)
    for rank, found in enumerate(run_ranks(load, 2)):
        np.testing.assert_array_equal(found, np.split(VALUE, 2, axis=1)[rank])


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_an_optimizer_of_torch_updates_it(options):
    def program(rank, sharded):
        w = variable() if sharded else torch.nn.Parameter(torch.tensor(VALUE))
        optimizer = torch.optim.Adam([w], lr=0.1, **options)
        for _ in range(2):
            optimizer.zero_grad()
            (w**2).sum().backward()
            optimizer.step()
        return (w.full_tensor() if sharded else w).detach().numpy()

    (expected,) = run_ranks(program, 1, False)
    for found in run_ranks(program, 2, True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_redistribute_refuses_wrong_placements():
    def program(rank):
        w = variable()
        with pytest.raises(LayoutError, match="needs placements, one per mesh axis"):
            w.redistribute()
        with pytest.raises(LayoutError, match="takes 2 placements, one per axis, got 1"):
            w.redistribute(placements=[Shard(0)])
        other = torch.distributed.init_device_mesh("cpu", (2,))
        with pytest.raises(LayoutError, match="cannot be redistributed to another mesh"):
            w.redistribute(other, [Shard(0)])

    run_ranks(program, 2)


def test_a_layout_that_placements_cannot_say_is_no_dtensor():
    def program(rank):
        distribute((2, 1))
        rows = shardcore.distribute_tensor(np.ones((5, 4, 3), "float32"), ("data", None, None))
        flat = rows.reshape(20, 3)  # 12 and 8: three rows of four, and two
        assert isinstance(rows, DTensor)
        assert not isinstance(flat, DTensor)
        assert isinstance(flat.reshape(5, 4, 3), DTensor)
        return tuple(flat.to_local().shape)

    assert run_ranks(program, 2) == [(12, 3), (8, 3)]
