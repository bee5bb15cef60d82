"""The runner of the matrix sees what is wrong, and goes on behind what breaks."""

import os
import time

import keras
import numpy as np
import torch
from attrs import evolve

from shardcore.testing import run_ranks
from tests.matrix import forks, parity
from tests.matrix.parity import Case, Mesh, compare, one_device, over_mesh

MESH = Mesh((1, 2), "last")


def batch(rng, rows):
    return rng.normal(size=(rows, 4)).astype("float32"), np.zeros((rows, 2), "float32")


def ranks():
    """The number of ranks and this rank; one device is rank 0 of 1."""
    if not torch.distributed.is_initialized():
        return 1, 0
    return torch.distributed.get_world_size(), torch.distributed.get_rank()


def planted(name, fault):
    """A model that is right on one device; over a mesh `fault(rank, x)` happens to its input."""

    def call(x):
        count, rank = ranks()
        return fault(rank, x) if count > 1 and x.device.type != "meta" else x

    def build():
        x = keras.Input((4,))
        h = keras.layers.Lambda(call, output_shape=(4,))(x)
        model = keras.Model(x, keras.layers.Dense(2)(h))
        model.compile("sgd", "mse")
        return model

    return Case(name, build, batch, rows=(4,))


def fails(rank, x):
    raise ValueError("on purpose on every rank")


def fails_alone(rank, x):
    if rank == 1:
        raise ValueError("on purpose on rank 1")
    return x


def dies(rank, x):
    if rank == 1:
        os._exit(3)
    return x


def hangs(rank, x):
    if rank == 1:
        time.sleep(600)
    return x


def test_each_fault_is_reported_and_the_next_case_runs(monkeypatch):
    monkeypatch.setattr(forks, "ITEM_SECONDS", 8)
    faults = [
        planted("first", lambda rank, x: x),
        planted("a little wrong", lambda rank, x: x * 1.001),
        planted("wrong on one rank", lambda rank, x: x + rank),
        planted("fails", fails),
        planted("fails alone", fails_alone),
        planted("dies", dies),
        planted("hangs", hangs),
        planted("last", lambda rank, x: x),
    ]
    outcomes = over_mesh(faults, MESH, one_device(faults))
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "first": "ok",
        "a little wrong": "WRONG",
        "wrong on one rank": "WRONG",
        "fails": "error",
        "fails alone": "error",
        "dies": "error",
        "hangs": "error",
        "last": "ok",
    }
    assert "on purpose on rank 1" in outcomes["fails alone"].detail


@torch.library.custom_op("shardcore_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_fall_back_is_reported():
    def build():
        x = keras.Input((4,))
        h = keras.layers.Dense(4)(x)
        h = keras.layers.Lambda(lambda v: twice(v.detach()), output_shape=(4,))(h)
        model = keras.Model(x, keras.layers.Dense(2)(h))
        model.compile("sgd", "mse")
        return model

    case = Case("rare", build, batch, rows=(4,))
    outcome = over_mesh([case], MESH, one_device([case]))["rare"]
    assert (outcome.status, outcome.fell_back) == ("fell back", ("shardcore_tests.twice.default",))


def test_a_variable_that_is_not_on_the_mesh_is_found():
    case = planted("plain", lambda rank, x: x)

    def program(rank):
        keras.distribution.set_distribution(None)
        try:
            parity.train(case, MESH)
        except AssertionError as error:
            return str(error)
        return ""

    assert all("is plain" in message for message in run_ranks(program, 2))


def test_a_tolerance_is_of_the_largest_value():
    one = {"w": np.array([1.0, 1e-6])}
    assert compare({"w": np.array([1.0, 9e-5])}, one, 1e-4) == ""
    assert "differs" in compare({"w": np.array([1.0, 2e-4])}, one, 1e-4)
    assert "shape" in compare({"w": np.array([1.0])}, one, 1e-4)
    assert "dtype" in compare({"w": one["w"].astype("float32")}, one, 1e-4)
    assert "finite" in compare({"w": np.array([np.nan, 1e-6])}, one, 1e-4)
    assert "other values" in compare({}, one, 1e-4)


def test_specs_shard_the_dim_that_the_mesh_names():
    shapes = {"kernel": (4, 6), "bias": (6,), "one": (4, 1)}
    assert parity.specs(MESH, shapes) == {"kernel": (None, "model"), "bias": ("model",)}
    first = evolve(MESH, kernels="first")
    assert parity.specs(first, shapes) == {"kernel": ("model", None), "one": ("model", None)}
    both = Mesh((2, 2), "last", ("data", "model"))
    assert parity.specs(both, shapes)["kernel"] == (None, ("data", "model"))
