"""`model.export` of a sharded model: rank 0 writes what one device would have written."""

import os

import keras
import numpy as np
import pytest
import torch

from shardcore.testing import run_ranks
from tests.distributed.programs import distribute, placements

RULES = {"first/kernel": (None, "model"), "second/kernel": ("model", None)}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 12)).astype("float32")
Y = RNG.normal(size=(6, 4)).astype("float32")


def trained():
    keras.utils.set_random_seed(1)
    x = keras.Input((12,))
    h = keras.layers.BatchNormalization()(keras.layers.Dense(8, "relu", name="first")(x))
    model = keras.Model(x, keras.layers.Dense(4, name="second")(h))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.train_on_batch(X, Y)
    return model


def read(path):
    program = torch.export.load(path)
    state = {name: value.detach().numpy() for name, value in program.state_dict.items()}
    return state, program.module()(torch.as_tensor(X[:1])).detach().numpy()


def test_the_artefact_is_that_of_one_device_and_training_goes_on(tmp_path):
    def export(rank, mesh):
        if mesh:
            distribute(mesh, RULES)
        model = trained()
        model.export(tmp_path / f"{mesh}.pt2", format="torch")
        held = {v.path: placements(v.value) for v in model.variables}
        tracked = {placements(parameter) for parameter in model.parameters()}
        return model.train_on_batch(X, Y), held, tracked, read(tmp_path / f"{mesh}.pt2")

    ((further, _, _, (state, outputs)),) = run_ranks(export, 1, None)
    for loss, held, tracked, (saved, predicted) in run_ranks(export, 2, (1, 2)):
        np.testing.assert_allclose(loss, further, atol=1e-6)
        assert held["first/kernel"] == "R S(1)"
        assert "plain" not in tracked | set(held.values())
        assert saved.keys() == state.keys()
        for name, value in state.items():
            np.testing.assert_allclose(saved[name], value, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(predicted, outputs, atol=1e-6)
    assert sorted(os.listdir(tmp_path)) == ["(1, 2).pt2", "None.pt2"]


def test_an_export_that_fails_on_rank_0_fails_on_every_rank(tmp_path):
    def export(rank):
        distribute((1, 2), RULES)
        model = trained()
        with pytest.raises(ValueError, match="unknown_name") as raised:
            model.export(tmp_path / "model.pt2", format="torch", unknown_name=1)
        model.train_on_batch(X, Y)
        return str(raised.value), raised.value.__notes__

    own, other = run_ranks(export, 2)
    assert own == other
    assert "Rank 0 could not export" in own[1][0]
    assert os.listdir(tmp_path) == []
