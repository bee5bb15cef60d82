"""The measured lines are those that this process and its forks run, also if they are killed."""

import subprocess
import sys
from pathlib import Path

SOURCE = '''\
"""A module."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nothing


def used(wanted):
    """Returns something."""
    if wanted:
        number = 1
        return number
    else:
        for each in "ab":
            print(each)
            continue


class Unused:
    number = 3

    def method(self):
        with open("x") as file:
            return (
                file
            )
'''

PROGRAM = """
import os, signal, sys
from pathlib import Path
from tests import line_coverage as lines

lines.SOURCE, lines.FOLDER = Path("shardcore").resolve(), Path("lines").resolve()
sys.path.insert(0, os.getcwd())
lines.measure()
from shardcore import module

assert module.used.__doc__ == "Returns something.", "docstrings are kept"
if os.fork() == 0:
    module.used(True)
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
lines.report()
"""


def test_lines_of_a_killed_fork_count_and_lines_that_did_not_run_are_named(tmp_path):
    (tmp_path / "shardcore").mkdir()
    (tmp_path / "shardcore" / "__init__.py").touch()
    (tmp_path / "shardcore" / "module.py").write_text(SOURCE)
    environment = {"SHARDCORE_LINES": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    for _ in range(2):  # the second process finds the code that the first has compiled
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines() == [
            "module.py: 5 of 14: 14-16, 23-24",
            "64.3 % of 14 lines were run.",
        ], done.stderr
