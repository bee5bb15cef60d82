"""A few cases under strategy `manual`; `--strategy manual` runs all of them."""

import pytest

from tests.matrix import ops_run, placing, strategies
from tests.matrix.cases.ops import CASES
from tests.matrix.suite import CLASSES, OVER_WEIGHTS, unexpected

FUNCTIONS = ("any", "reshape", "softmax", "take")
LAYERS = (
    "BatchNormalization/odd",
    "Conv2D",
    "Dense/regularized",
    "Dropout/global seed",
    "Embedding/masked",
    "GRU/masked",
    "MultiHeadAttention/causal",
)


@pytest.fixture(autouse=True)
def manual(monkeypatch):
    monkeypatch.setenv(strategies.VARIABLE, "manual")


def test_functions():
    cases = {name: CASES[name] for name in FUNCTIONS}
    found = ops_run.over_mesh(cases, placing.MESHES["(2, 2)"])
    assert len({name.partition("[")[0] for name in found}) == len(FUNCTIONS)
    assert unexpected(found) == {}


def test_layers():
    found = CLASSES["layers"].run(OVER_WEIGHTS, LAYERS)
    assert set(found) == set(LAYERS)
    assert unexpected(found) == {}


def test_optimizers():
    found = CLASSES["optimizers"].run(OVER_WEIGHTS, ("Adam/all", "Lamb", "Muon"))
    assert len(found) == 3
    assert unexpected(found) == {}
