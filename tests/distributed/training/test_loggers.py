"""Loggers of other packages: one rank may have one alone; a run of each rank is an error.

Stand-ins take the place of the packages: `make loggers` runs the packages themselves.
"""

import sys
from types import ModuleType, SimpleNamespace

import keras
import numpy as np
import pytest

from shardcore.domain.errors import CallProblem
from shardcore.testing import run_ranks
from tests.distributed.programs import STRATEGY, distribute

X = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")


class Log(keras.callbacks.Callback):
    """Logs as the callbacks of the packages do: the model at first, then each step and epoch."""

    def __init__(self):
        super().__init__()
        self.steps, self.epochs, self.summary = [], [], []

    def on_train_begin(self, logs=None):
        self.model.summary(print_fn=lambda line, **_: self.summary.append(line))
        self.rate = self.model.optimizer.get_config()["learning_rate"]

    def on_train_batch_end(self, batch, logs=None):
        rate = self.model.optimizer.learning_rate.numpy().item()
        self.steps.append((float(logs["loss"]), rate))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(float(logs["loss"]))


def fit(*callbacks):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model.fit(X, X[:, :1], 8, 4, 0, callbacks=list(callbacks)).history["loss"]


def test_a_logger_of_rank_0_alone_logs_what_one_device_would():
    def program(rank, mesh):
        if mesh:
            distribute(mesh, {".*/kernel": (None, "model")}, strategy=STRATEGY)
        log = Log()
        losses = fit(*[log][rank:])
        return losses, log.steps, log.epochs

    ((losses, steps, epochs),) = run_ranks(program, 1, None)
    assert len(steps) == 20
    for mesh in [(2, 1), (1, 2)]:
        first, second = run_ranks(program, 2, mesh)
        np.testing.assert_allclose(first[1], steps, rtol=1e-4)
        np.testing.assert_allclose(first[2], epochs, rtol=1e-4)
        assert first[0] == second[0] == first[2]
        np.testing.assert_allclose(first[0], losses, rtol=1e-4)
        assert second[1:] == ([], [])


def logger_of(package, **run):
    """A callback of a package, which has an open run."""
    sys.modules[package] = ModuleType(package)
    settings = SimpleNamespace(mode=run.pop("mode", "offline"))
    own = {"disabled": False, "group": "", "settings": settings} | run
    sys.modules[package].run = SimpleNamespace(**own)
    base = type("Base", (Log,), {"__module__": f"{package}.keras.callbacks"})
    return type("MetricsLogger", (base,), {})()  # as a class of the user, of such a base


@pytest.mark.parametrize(
    ("package", "remedy"),
    [("wandb", r'init\(mode="disabled"\) on each rank'), ("mlflow", "to rank 0 alone")],
)
def test_a_run_of_each_rank_is_an_error_on_all_ranks(package, remedy):
    def program(rank):
        distribute((3, 1), strategy=STRATEGY)
        log = logger_of(package)
        with pytest.raises(CallProblem, match=f"MetricsLogger.* on each of ranks 1, 2.*{remedy}"):
            fit(*[log] if rank > 0 else [])
        return log.summary  # no hook has run

    assert run_ranks(program, 3) == [[]] * 3


@pytest.mark.parametrize("option", [{"disabled": True}, {"group": "ranks"}, {"mode": "shared"}])
def test_a_run_of_wandb_may_be_disabled_in_a_group_or_shared(option):
    def program(rank):
        distribute((2, 1), strategy=STRATEGY)
        log = logger_of("wandb", **{} if rank == 0 and "disabled" in option else option)
        fit(log)
        return log.epochs

    first, second = run_ranks(program, 2)
    assert len(first) == 4
    assert first == second
