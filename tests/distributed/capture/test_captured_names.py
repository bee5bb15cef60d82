"""A captured step sees what a function of the user's reads, or is not captured and says why."""

import cProfile
import itertools
import logging
import os
import random
import time
from collections import deque
from contextvars import ContextVar
from types import SimpleNamespace
from unittest import mock

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.binding.capture import reports
from shardcore.testing import run_ranks
from tests.distributed.capture import stale_constants
from tests.distributed.capture.stale_constants import RATE
from tests.distributed.capture.steps import Spy, calls, is_real, messages

STEPS = 3
FACTOR = 1.0
LISTED, TABLE, ENDS = [1.0], {"a": [{"b": 1.0}]}, deque([1.0])
ARRAY, LARGE = np.ones(3), np.ones(2_000_000)
SETTINGS = SimpleNamespace(deep=SimpleNamespace(deeper=[1.0]))
TENSOR = torch.tensor(1.0)
CONTEXT = ContextVar("factor", default=1.0)
COUNT = itertools.count()
GENERATOR, PYTHON_GENERATOR = np.random.default_rng(0), random.Random(0)

CHAIN = INNERMOST = [1.0]
for _ in range(200):
    CHAIN = [CHAIN]


def innermost(chain):
    return innermost(chain[0]) if isinstance(chain[0], list) else chain[0]


class Config:
    rate = 1.0


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * FACTOR

    @staticmethod
    def backward(context, gradient):
        return gradient * FACTOR


def scaled(x, factor=1.0, *, table={"factor": 1.0}):  # noqa: B006 - a default that changes
    return x * factor * table["factor"]


def with_closure():
    factor = 1.0

    def scale(x):
        return x * factor

    def change():
        nonlocal factor
        factor = 2.0

    return scale, change


scale, change_closure = with_closure()


def of_method(x):
    return BOUND.scaled(x)


class Bound:
    def __init__(self):
        self.factor = 1.0

    def scaled(self, x):
        return x * self.factor


BOUND = Bound()


def contains(path, text):
    with open(path) as file:
        return text in file.read()


def rebind(name, value):
    return lambda: globals().__setitem__(name, value)


# What a layer's call does with its input, and what a callback changes later.
SEEN = {
    "a global variable": (lambda x: x * FACTOR, rebind("FACTOR", 2.0)),
    "a constant that was imported": (lambda x: x * RATE, rebind("RATE", 2.0)),
    "a variable of a module": (
        lambda x: x * stale_constants.RATE,
        lambda: setattr(stale_constants, "RATE", 2.0),
    ),
    "a variable of a module of a module": (
        lambda x: x * stale_constants.stale_settings.stale_constants.stale_settings.SHARE,
        lambda: setattr(stale_constants.stale_settings, "SHARE", 2.0),
    ),
    "a name in a text": (
        lambda x: x * getattr(stale_constants, "FACTOR"),  # noqa: B009
        lambda: setattr(stale_constants, "FACTOR", 2.0),
    ),
    "a list": (lambda x: x * LISTED[0], lambda: LISTED.__setitem__(0, 2.0)),
    "a dict in a list in a dict": (
        lambda x: x * TABLE["a"][0]["b"],
        lambda: TABLE["a"][0].update(b=2.0),
    ),
    "a list in two hundred lists": (
        lambda x: x * innermost(CHAIN),
        lambda: INNERMOST.__setitem__(0, 2.0),
    ),
    "a deque": (lambda x: x * ENDS[0], lambda: ENDS.__setitem__(0, 2.0)),
    "an array": (lambda x: x * float(ARRAY[1]), lambda: ARRAY.fill(2.0)),
    "an object in an object": (
        lambda x: x * SETTINGS.deep.deeper[0],
        lambda: SETTINGS.deep.deeper.__setitem__(0, 2.0),
    ),
    "a tensor, written": (lambda x: x * TENSOR, lambda: TENSOR.fill_(2.0)),
    "a tensor, another one": (lambda x: x * TENSOR, rebind("TENSOR", torch.tensor(3.0))),
    "a context variable": (lambda x: x * CONTEXT.get(), lambda: CONTEXT.set(2.0)),
    "an attribute of a class": (lambda x: x * Config.rate, lambda: setattr(Config, "rate", 2.0)),
    "a default": (lambda x: scaled(x + 0), lambda: setattr(scaled, "__defaults__", (2.0,))),
    "the content of a default": (
        scaled,
        lambda: scaled.__kwdefaults__["table"].update(factor=2.0),
    ),
    "a closure": (scale, change_closure),
    "an object of a method": (of_method, lambda: setattr(BOUND, "factor", 2.0)),
    "a function": (lambda x: scaled(x + 0), rebind("scaled", lambda x: x * 5.0)),
    "a function of autograd": (Doubled.apply, rebind("FACTOR", 3.0)),
    "the environment": (
        lambda x: x * float(os.environ.get("FIRST_FACTOR", "1")),
        lambda: os.environ.update(FIRST_FACTOR="2"),
    ),
    "the environment, asked": (
        lambda x: x * float(os.getenv("SECOND_FACTOR", "1")),
        lambda: os.environ.update(SECOND_FACTOR="2"),
    ),
    "a setting of Keras": (
        lambda x: x * (keras.config.epsilon() * 1e7),
        lambda: keras.config.set_epsilon(2e-7),
    ),
}
REFUSED = {
    "it reads global variable 'LARGE'": lambda x: x * float(LARGE[0]),
    "it reads global variable 'COUNT'": lambda x: x * (1.0 if next(COUNT) < 9 else 2.0),
    "global variable 'GENERATOR'": lambda x: x * (1.0 if GENERATOR.random() < 1 else 2.0),
    "global variable 'PYTHON_GENERATOR'": lambda x: (
        x * (1.0 if PYTHON_GENERATOR.random() < 1 else 2.0)
    ),
    "calls time.time(), which may return something else": lambda x: (
        x * (1.0 if time.time() > 0 else 2.0)
    ),
    "calls builtins.globals(), which may return": lambda x: x * globals()["FACTOR"],
    "calls torch.set_default_dtype(), which reads or sets what no guard": lambda x: (
        x * (2.0 if torch.set_default_dtype(torch.float32) else 1.0)
    ),
    "calls io.open(), which may return": lambda x: x * (2.0 if contains(__file__, "\0") else 1.0),
}


class Calls(Spy):
    """Calls a function."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(super().call(x)) if is_real(x) else x


def begin(strategy):
    shardcore.install(strategy)
    if strategy != "single":
        ranks = len(keras.distribution.list_devices())
        mesh = keras.distribution.DeviceMesh((ranks, 1), ("data", "model"))
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(
                layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="data"
            )
        )


def trained(function, change, jit_compile):
    """The losses of steps before and after a change, and how many of them ran Python."""
    keras.utils.set_random_seed(0)
    x = keras.Input((3,))
    model = keras.Model(x, keras.layers.Dense(1)(Calls(function)(x)))
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=jit_compile)
    calls.clear()
    data = np.ones((4, 3), "float32"), np.zeros((4, 1), "float32")
    before = [float(model.train_on_batch(*data)) for _ in range(STEPS)]
    change()
    return before + [float(model.train_on_batch(*data)) for _ in range(STEPS)], len(calls)


# On a mesh the same code makes and checks guards, so one value of each kind is tested there.
ON_A_MESH = (
    *("a global variable", "a constant that was imported", "a variable of a module of a module"),
    *("a list", "a dict in a list in a dict", "an array", "an attribute of a class", "a default"),
    *("a closure", "an object of a method", "a tensor, written", "a tensor, another one"),
    *("a context variable", "a function of autograd", "the environment", "a setting of Keras"),
    *("it reads global variable 'LARGE'", "global variable 'GENERATOR'"),
    "calls builtins.globals(), which",
)


def cases_of(table, strategy):
    chosen = tuple(table) if strategy == "single" else ON_A_MESH
    return {name: case for name, case in table.items() if name.startswith(chosen)}


def seen(_rank, strategy, jit_compile):
    begin(strategy)
    cases = cases_of(SEEN, strategy)
    return {name: trained(*case, jit_compile) for name, case in cases.items()}


@pytest.fixture(scope="module")
def eager():
    (found,) = run_ranks(seen, 1, "single", False)
    return found


@pytest.mark.parametrize("strategy", ["single", "dtensor", "manual"])
def test_a_step_sees_what_its_functions_read(strategy, eager):
    for found in run_ranks(seen, 2 if strategy == "dtensor" else 1, strategy, "auto", timeout=200):
        for name, (losses, runs) in found.items():
            assert losses == pytest.approx(eager[name][0], rel=1e-6), name
            assert losses[0] != losses[-1], f"{name}: the change made no difference"
            assert runs < eager[name][1] == 2 * STEPS, f"{name} was never captured"


@pytest.mark.parametrize("strategy", ["single", "dtensor", "manual"])
def test_a_value_that_no_guard_can_compare_keeps_a_step_eager_with_a_message(strategy):
    def program(rank):
        begin(strategy)
        said, found = messages(), {}
        for reason, function in cases_of(REFUSED, strategy).items():
            said.clear()
            found[reason] = trained(function, lambda: None, "auto")[1], list(said)
        return found

    for found in run_ranks(program, 2 if strategy == "dtensor" else 1):
        for reason, (runs, said) in found.items():
            assert runs == 2 * STEPS, reason
            assert [reason in each for each in said] == [True], said


def test_recording_that_takes_long_says_so_once():
    def program(rank):
        begin("single")
        said = messages(logging.INFO)
        with mock.patch.object(reports, "PATIENCE", 0.0):
            trained(lambda x: x, lambda: None, "auto")
        return said

    (said,) = run_ranks(program, 1)
    assert ["its first steps are recorded" in each for each in said] == [True]


def test_a_refusal_names_the_layer_and_a_remedy():
    def program(rank):
        begin("single")
        said = messages()
        trained(lambda x: x + (x.detach().numpy().sum() > 0), lambda: None, "auto")
        return said

    ((said,),) = run_ranks(program, 1)
    assert "test_captured_names.py" in said
    assert "in layer 'functional/calls'" in said or "in layer 'calls'" in said
    assert "compute with keras.ops" in said


def test_under_a_profiler_no_step_is_recorded_and_captured_ones_run():
    def program(rank):
        begin("single")
        with cProfile.Profile(builtins=False):
            under_profiler = trained(lambda x: x, lambda: None, "auto")[1]
        return under_profiler, trained(lambda x: x, lambda: None, "auto")[1]

    assert run_ranks(program, 1) == [(2 * STEPS, 2)]
