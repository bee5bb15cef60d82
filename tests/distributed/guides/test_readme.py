"""The commands and the script of the README work."""

import os
import re
from pathlib import Path

import pytest

from tests.checks.tree import python

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def run(tmp_path):
    """Runs the script of the README as a stranger does: no backend is chosen beforehand."""
    (script,) = blocks("python")
    (tmp_path / "script.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}

    def run(*launcher):
        variables = {**environment, "OMP_NUM_THREADS": "1"}
        return python(*launcher, "script.py", cwd=tmp_path, **variables)

    return run


def test_the_script_has_fifteen_lines():
    (script,) = blocks("python")
    assert len([line for line in script.splitlines() if line]) == 15


def test_the_script_prints_what_the_readme_shows(run):
    (session,) = (block for block in blocks("console") if "script.py" in block)
    alone, launched = re.findall(r"^\$ .*\n((?:\[.*\n)+)", session, re.MULTILINE)
    assert run() == alone
    line, other = launched.splitlines()
    assert line == other
    assert run(*TORCHRUN).count(line) == 2  # the ranks' line ends may interleave
