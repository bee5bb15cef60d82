"""Runs the tests of callbacks, and writes docs/reference/callbacks.md.

.venv-loggers/bin/python -m tests.loggers
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.loggers import page

FILES = ("tests/distributed/training/test_callbacks.py", "tests/loggers/test_loggers.py")


class Outcomes:
    """A plug-in of pytest that collects the outcomes of each test function."""

    def __init__(self) -> None:
        self.by_node: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes the outcome of a test, or of a set-up that failed or skipped it."""
        if report.when == "call" or (report.when == "setup" and not report.passed):
            node = report.nodeid.partition("[")[0]
            self.by_node.setdefault(node, []).append(report.outcome)


def rows() -> list[page.Row]:
    """Lists the callbacks that have a test, with its node."""
    # After pytest, which rewrites the packages that it finds not imported.
    from tests.distributed.training import test_callbacks
    from tests.loggers import test_loggers

    of_keras = {("keras", name): test for name, test in test_callbacks.TESTED.items()}
    tables = zip(FILES, (of_keras, test_loggers.TESTED), strict=True)
    return [
        (*callback, f"{file}::{test.__name__}")
        for file, tests in tables
        for callback, test in tests.items()
    ]


def main(arguments: list[str]) -> int:
    """Runs the tests, and writes what came of each callback; gives the exit code of pytest."""
    outcomes = Outcomes()
    code = pytest.main(["-n", "0", "--durations=10", *arguments, *FILES], plugins=[outcomes])
    page.keep(rows(), outcomes.by_node)
    page.write()
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
