"""The example of a plug-in is a package: it is installed, and its own tests run against it."""

import os
import shutil
from pathlib import Path

from tests import warm
from tests.checks.tree import python
from tests.plugins.packages import pip_install

EXAMPLE = Path(__file__).parents[3] / "examples" / "strategy-plugin"
TESTS = "test_zero1.py"


# What the example changes something of; `pytest` in its folder tests all the promises.
PROMISES = "half or one_rank or data_parallel or gradient or file"


def test_the_example_keeps_its_promises_where_it_is_installed(tmp_path):
    source = shutil.copytree(EXAMPLE, tmp_path / "source", ignore=shutil.ignore_patterns("__*"))
    site = pip_install(source, tmp_path / "site")
    assert not (site / TESTS).exists()
    (tmp_path / "author").mkdir()
    shutil.copy(EXAMPLE / TESTS, tmp_path / "author")
    path = filter(None, [str(site), os.environ.get("PYTHONPATH")])
    options = ["-q", "-p", "no:cacheprovider", "-k", PROMISES]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = warm.run(["-m", "pytest", *options, TESTS], environment, tmp_path / "author", 280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n7 passed, 12 deselected" in done.stdout


def test_offering_the_example_loads_no_torch(tmp_path):
    shutil.copy(EXAMPLE / "zero1_strategy.py", tmp_path)
    program = "import sys, zero1_strategy as z; z.shardcore_strategies(); print(sys.modules.keys())"
    assert "'torch'" not in python("-c", program, cwd=tmp_path)
