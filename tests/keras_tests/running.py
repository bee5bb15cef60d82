"""Runs test files in the wheel of Keras, in ranks forked from this process."""

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import pytest
import torch

from shardcore.errors import RankFailed, ShardcoreError
from shardcore.testing import run_ranks
from tests.keras_tests.reasons import LEFT_OUT

KERAS = Path(keras.__file__).parent
# The test files import these, and use them in tests of other backends.
ELSEWHERE = ("grain", "jax", "tensorflow")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MARKS = ("multi_device", "requires_trainable_backend")
# Seconds for the tests of a file on several ranks, and for those of one process.
FILE_SECONDS, PLAIN_SECONDS = 900, 240
# Seconds that a rank waits for the others to end a test.
TEST_SECONDS = 60
# Characters of an error that are kept.
SHOWN = 300
BEGUN = "begun"
# The name of a file's collection among those of its tests.
COLLECTION = "collection"
# Prepares a rank, and returns what is called before each test.
Prepare = Callable[[], Callable[[], None]]


class Outcomes:
    """A plug-in of pytest that lifts the marks of tests for JAX, and keeps the outcomes by name.

    Args:
        ran_before: The names of tests that do not run.
    """

    def __init__(self, ran_before: Collection[str] = ()) -> None:
        self.outcome_of: dict[str, str] = {}
        self.absent = [name for name in ELSEWHERE if importlib.util.find_spec(name) is None]
        self._ran_before = ran_before

    def pytest_configure(self, config: pytest.Config) -> None:
        for mark in MARKS:
            config.addinivalue_line("markers", mark)

    def pytest_collection(self) -> None:
        sys.modules.update((name, ModuleType(name)) for name in self.absent)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if _name(item.nodeid) not in self._ran_before]
        for item in items:
            for node in item.listchain():
                node.own_markers = [mark for mark in node.own_markers if not is_for_jax(mark)]

    def pytest_collection_finish(self) -> None:
        for name in self.absent:  # which Keras looks for while tests run
            del sys.modules[name]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcome_of[COLLECTION] = f"failed: {str(report.longrepr)[-SHOWN:]}"

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = (yield).get_result()  # type: ignore[func-returns-value]
        report.is_refused = call.excinfo is not None and _is_refusal(call.excinfo.value)

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = _name(report.nodeid)
        if report.failed:
            kind = "refused" if report.is_refused else "failed"
            self.outcome_of[name] = f"{kind}: {report.longrepr.reprcrash.message[:SHOWN]}"
        elif report.when == "call" or report.skipped:
            self.outcome_of.setdefault(name, report.outcome)


class Together(Outcomes):
    """Runs the tests on several ranks one by one; all ranks stop after a test that fails on one.

    Ranks tell each other by files: a rank may be in a collective that the other does not join.

    Args:
        ran_before: The names of tests that do not run.
        logs: A file for each rank, which gets a line as a test begins, and one with its outcome.
        rank: The number of this rank.
        reset: Called before each test.
    """

    def __init__(
        self, ran_before: Collection[str], logs: list[Path], rank: int, reset: Callable[[], None]
    ) -> None:
        super().__init__(ran_before)
        self._own = logs[rank]
        self._others = [log for log in logs if log != self._own]
        self._reset = reset
        self._read_to = dict.fromkeys(self._others, 0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        super().pytest_collectreport(report)
        for name, outcome in self.outcome_of.items():
            self._note(name, outcome)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note(_name(nodeid), BEGUN)
        self._reset()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        name = _name(nodeid)
        self._note(name, self.outcome_of.get(name, "failed: no report"))

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Waits for the other ranks, and stops if the last test failed on one."""
        finished = list(self.outcome_of)
        outcomes = [self.outcome_of[finished[-1]]] if finished else []
        outcomes += [self._wait_for(log, finished[-1]) for log in self._others if finished]
        if any(map(has_failed, outcomes)):
            pytest.exit("a test failed", returncode=0)

    def _note(self, name: str, outcome: str) -> None:
        with self._own.open("a") as file:
            file.write(json.dumps([name, outcome]) + "\n")

    def _wait_for(self, log: Path, name: str) -> str:
        """Returns the outcome of a test on another rank."""
        end = time.monotonic() + TEST_SECONDS
        while time.monotonic() < end:
            with log.open() as file:
                file.seek(self._read_to[log])
                for line in iter(file.readline, ""):
                    if not line.endswith("\n"):
                        break
                    self._read_to[log] = file.tell()
                    noted, outcome = json.loads(line)
                    if noted == name and outcome != BEGUN:
                        return str(outcome)
            time.sleep(0.002)
        raise TimeoutError(f"{name} has not ended on another rank within {TEST_SECONDS} s.")


def files(beginnings: Iterable[str], only_operators: bool = False) -> list[str]:
    """Returns the test files below `keras/src` whose path begins with one of these."""
    paths = sorted(str(path.relative_to(KERAS / "src")) for path in KERAS.rglob("*_test.py"))
    return [
        path
        for path in paths
        if path.startswith(tuple(beginnings))
        and not path.startswith(tuple(LEFT_OUT))
        and (path.startswith("ops/") or not only_operators)
    ]


def is_for_jax(mark: pytest.Mark) -> bool:
    return mark.name == "skipif" and mark.kwargs.get("reason", "").startswith("Only JAX has the ")


def outcomes(file: str, prepare: Callable[[], object], chosen: str = "") -> dict[str, str]:
    """Returns the outcome of each test of a file in one process, by the name of the test.

    Args:
        file: The path below `keras/src`.
        prepare: Called before the tests.
        chosen: The tests, as for `pytest -k`.
    """

    def program(rank: int) -> dict[str, str]:
        for name in LAUNCHER:
            del os.environ[name]
        prepare()
        plugin = Outcomes()
        _run(file, plugin, chosen)
        return plugin.outcome_of

    return run_ranks(program, 1, init=False, timeout=PLAIN_SECONDS)[0]


def outcomes_on_ranks(
    file: str, prepare: Prepare, chosen: str = "", count: int = 2
) -> dict[str, str]:
    """Returns the worst outcome over ranks of each test of a file, by the name of the test.

    After a test that fails, new ranks run those behind it.

    Args:
        file: The path below `keras/src`.
        prepare: Called on each rank before the tests; returns what is called before each test.
        chosen: The tests, as for `pytest -k`.
        count: The number of ranks.
    """
    outcome_of: dict[str, str] = {}
    while True:
        more = _outcomes_of_launch(file, prepare, chosen, count, outcome_of)
        outcome_of |= more
        if COLLECTION in more or not any(map(has_failed, more.values())):
            return outcome_of


def _outcomes_of_launch(
    file: str, prepare: Prepare, chosen: str, count: int, ran_before: Collection[str]
) -> dict[str, str]:
    """Runs the tests of a file to the first that fails."""
    with tempfile.TemporaryDirectory(prefix="keras-tests-") as folder:
        logs = [Path(folder, str(rank)) for rank in range(count)]
        for log in logs:
            log.touch()

        def program(rank: int) -> None:
            _run(file, Together(ran_before, logs, rank, prepare()), chosen)

        failure = ""
        try:
            run_ranks(program, count, timeout=FILE_SECONDS)
        except RankFailed as error:
            failure = str(error)
        outcome_of = _joined(logs, failure[-SHOWN:] or "the tests ended within it")
        if failure and not outcome_of:
            outcome_of[COLLECTION] = f"failed: {failure[:SHOWN]}"
        return outcome_of


def _run(file: str, plugin: Outcomes, chosen: str) -> None:
    warnings.resetwarnings()
    sys.modules["conftest"] = _conftest()
    torch.compiler.set_stance("force_eager")  # to compile a step takes half a minute
    options = ["-q", "-c", os.devnull, f"--rootdir={KERAS}", "--tb=short", "--noconftest"]
    options += ["-k", chosen]
    options += [f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "xdist")]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main([*options, str(KERAS / "src" / file)], plugins=[plugin])


def _conftest() -> ModuleType:
    """Returns what test files import of Keras' conftest.py, which the wheel lacks."""
    module: Any = ModuleType("conftest")
    module.skip_if_backend = lambda name, reason: pytest.mark.skipif(name == "torch", reason=reason)
    return module  # type: ignore[no-any-return]


def _joined(logs: Iterable[Path], failure: str) -> dict[str, str]:
    """Joins what the ranks noted; a test that did not end on a rank has failed."""
    outcome_of: dict[str, str] = {}
    for log in logs:
        for name, noted in dict(map(json.loads, log.read_text().splitlines())).items():
            outcome = f"failed: {failure}" if noted == BEGUN else noted
            if has_failed(outcome) or name not in outcome_of:
                outcome_of[name] = outcome
    return outcome_of


def has_failed(outcome: str) -> bool:
    return outcome.startswith(("failed", "refused"))


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, ShardcoreError) and not isinstance(error, RankFailed)


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2]
