"""Runs test files in the wheel of Keras, in a process forked from this one."""

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import keras
import pytest
import torch

from shardcore.testing import run_ranks

KERAS = Path(keras.__file__).parent
# The test files import these, and use them in tests of other backends.
ELSEWHERE = ("grain", "jax", "tensorflow")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MARKS = ("multi_device", "requires_trainable_backend")


class Outcomes:
    """A plug-in of pytest that lifts the marks of tests for JAX, and keeps the outcomes by name."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.absent = [name for name in ELSEWHERE if importlib.util.find_spec(name) is None]

    def pytest_configure(self, config: pytest.Config) -> None:
        for mark in MARKS:
            config.addinivalue_line("markers", mark)

    def pytest_collection(self) -> None:
        sys.modules.update((name, ModuleType(name)) for name in self.absent)

    def pytest_collection_modifyitems(self, items: Iterable[pytest.Item]) -> None:
        for item in items:
            for node in item.listchain():
                node.own_markers = [each for each in node.own_markers if not is_for_jax(each)]

    def pytest_collection_finish(self) -> None:
        for name in self.absent:  # which Keras looks for while tests run
            del sys.modules[name]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2]
        if report.failed:
            self.found[name] = f"failed: {report.longrepr.reprcrash.message}"
        elif report.when == "call" or report.skipped:
            self.found[name] = report.outcome


def is_for_jax(mark: pytest.Mark) -> bool:
    return mark.name == "skipif" and mark.kwargs.get("reason", "").startswith("Only JAX has the ")


def outcomes(file: str, prepare: Callable[[], object], chosen: str = "") -> dict[str, str]:
    """Returns the outcome of each test of a file, by the name of the test.

    Args:
        file: The path below `keras/src`.
        prepare: Called before the tests.
        chosen: The tests, as for `pytest -k`.
    """

    def program(rank: int) -> dict[str, str]:
        for name in LAUNCHER:
            del os.environ[name]
        warnings.resetwarnings()
        torch.compiler.set_stance("force_eager")  # to compile a step takes half a minute
        prepare()
        plugin = Outcomes()
        options = ["-q", "-c", os.devnull, f"--rootdir={KERAS}", "--tb=short", "-k", chosen]
        options += [f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "xdist")]
        pytest.main([*options, str(KERAS / "src" / file)], plugins=[plugin])
        return plugin.found

    return run_ranks(program, 1, init=False, timeout=240)[0]
