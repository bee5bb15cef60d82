"""Captured steps have the numbers of eager ones; and the comparison sees it if not.

A few cases; `make matrix-full` runs all of them, on more meshes.
"""

import attrs
import keras
import numpy as np
import pytest
import torch

from shardcore.adapters.capture import passes
from shardcore.adapters.capture.passes import Pass
from shardcore.binding.capture.python_state.guard import PythonGuard
from shardcore.binding.capture.step import CapturedStep
from tests.distributed.programs import needs_compiler
from tests.matrix import suite
from tests.matrix.captured import difference
from tests.matrix.cases.classifier import REAL, trained
from tests.matrix.suite import CAPTURED, COMPILED, ONE_DEVICE, Captured, Classes

MESH = "1x2, last dim over model"
OVER_TWO = {
    "captured layers": (
        "BatchNormalization/masked",
        "Conv2D/strided same",
        "Dropout/global seed",
        "Embedding/masked",
        "MaxPooling2D",
        "RandomFlip",
        "SpectralNormalization",
    ),
    "captured models": ("decoder",),
    "captured optimizers": ("Adam/all", "LossScaleOptimizer/overflowing"),
}
# What is not captured, and what is said of it.
EAGER = {
    "CTC": "the step reads values on the host",
    "own loss": "it reads other values on the host each time",
}
if not hasattr(torch.autograd.graph.Node, "_sequence_nr"):  # torch 2.10, whose optimizers do so
    EAGER["of torch"] = "the step calls builtins.compile()"


# On one device the others.
ALONE = {
    name: [case for case in each.table.fast if case not in OVER_TWO.get(name, ())]
    for name, each in CAPTURED.items()
    if name != "captured applications"  # large models of the layers that the tables have
}


@pytest.mark.parametrize("name", ALONE)
def test_on_one_device(name):
    expect(name, ONE_DEVICE, ALONE[name])


@pytest.mark.parametrize("name", OVER_TWO)
def test_over_two_ranks(name):
    expect(name, MESH, OVER_TWO[name])


@needs_compiler
def test_compiled():
    expect("compiled layers", ONE_DEVICE, ("Dropout/global seed",), COMPILED)


def test_over_four_ranks_of_which_some_have_more_rows():
    """By sizes they would decide otherwise which sums go together."""
    expect("captured layers", suite.FAST_MESH, ("BatchNormalization/masked", "Layer/add_loss"))


def expect(name, mesh, cases, tables=CAPTURED):
    found = tables[name].run(mesh, cases)
    assert set(found) == set(cases)
    assert {case: found[case] for case in cases if not as_expected(case, found[case])} == {}


def as_expected(case, outcome):
    if case in EAGER:
        return outcome.status == "eager" and outcome.detail.startswith(EAGER[case])
    return outcome.status == "ok"


PLAIN = trained("plain", lambda: {"loss": "mse", "optimizer": keras.optimizers.SGD(0.1)}, REAL)


def outcome_of_plain():
    found = Captured(Classes([PLAIN], None, ())).run(ONE_DEVICE)["plain"]
    return found.status, found.detail


def with_old_values(trace):
    """A pass that writes into the states of metrics what they hold already."""
    copy = torch.ops.aten.copy_.default
    return trace.with_calls(
        attrs.evolve(call, args=(call.args[0], call.args[0])) if call.operator is copy else call
        for call in trace.calls
    )


def test_a_pass_that_writes_other_values_is_found(monkeypatch):
    assert outcome_of_plain() == ("ok", "")
    of_step = passes.passes_of

    def with_broken(*memories, **sends):
        return (*of_step(*memories, **sends), Pass(with_old_values))

    monkeypatch.setattr(passes, "passes_of", with_broken)
    status, detail = outcome_of_plain()
    assert (status, "differs" in detail) == ("WRONG", True)


def test_a_change_that_no_step_sees_is_found(monkeypatch):
    monkeypatch.setattr(PythonGuard, "change", lambda held: "")
    found = CAPTURED["captured histories"].run(ONE_DEVICE, ["vectors/6"])
    assert found["vectors/6"].status == "WRONG"


def test_a_step_that_runs_eagerly_in_silence_is_found(monkeypatch):
    monkeypatch.setattr(CapturedStep, "_is_wanted", lambda step: False)
    status, detail = outcome_of_plain()
    assert (status, "nothing says why" in detail) == ("error", True)


def test_one_bit_is_a_difference_unless_there_is_a_tolerance():
    one = {"w": np.array([1.0, 0.0], "float32")}
    assert difference(one, one, 0.0) == ""
    next_to_it = {"w": np.nextafter(one["w"], np.float32(2))}
    assert "differs" in difference(next_to_it, one, 0.0)
    assert difference(next_to_it, one, 1e-6) == ""
    assert "other bits" in difference({"w": np.array([1.0, -0.0], "float32")}, one, 0.0)
    assert "other values" in difference({}, one, 0.0)
