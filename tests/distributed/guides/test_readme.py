"""The commands and the script of the README work."""

import os
import re
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def script(tmp_path):
    (script,) = blocks("python")
    (tmp_path / "script.py").write_text(script)
    return tmp_path / "script.py"


def test_the_script_prints_what_the_readme_shows(script):
    (session,) = (block for block in blocks("console") if "script.py" in block)
    alone, launched = re.findall(r"^\$ .*\n((?:\[.*\n)+)", session, re.MULTILINE)
    # As a stranger does: no backend is chosen beforehand.
    inherited = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    environment = {**inherited, "OMP_NUM_THREADS": "1"}
    assert warm.run([script.name], environment, script.parent).stdout == alone
    words = ["--standalone", "--nproc_per_node=2", script.name]
    ranks = warm.run_torchrun(words, environment, script.parent)
    line, other = launched.splitlines()
    assert line == other
    assert ranks.stdout.count(line) == 2, ranks.stderr  # the ranks' line ends may interleave
    (said,) = (line for line in ranks.stderr.splitlines() if "shardcore" in line)
    assert said.startswith("[shardcore rank 0] Layout map: 2 of 4 variables of model")
    assert "KERAS_BACKEND" not in ranks.stderr  # a start as usual is no news
    assert "ignored in" not in ranks.stderr  # no scope is closed after torch is gone
