"""What the README tells a stranger to do, done."""

import os
import re
from pathlib import Path

import pytest

from tests.checks.tree import python

ROOT = Path(__file__).parents[2]
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


def test_the_script_runs_alone(run):
    shown = run()
    assert "mesh (data=1, model=1), rank 0: all as it should be" in shown
    assert "(64, 512) │ (64, 512)" in shown
    assert "(512, 10) │ (512, 10)" in shown


def test_the_script_runs_on_two_ranks(run):
    shown = run(*TORCHRUN)
    assert "mesh (data=1, model=2), rank 0: all as it should be" in shown
    assert "(64, 512) │ (64, 256)" in shown
    assert "(512, 10) │ (256, 10)" in shown
    assert "rank 1: True" in shown
    assert shown.count("Epoch 2/2") == 1


def test_every_make_command_is_in_the_makefile():
    commands = set(re.findall(r"`make (\w+)`", README))
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert commands == {"demo", "test"}
    assert commands <= targets


def test_every_link_leads_to_a_file():
    for file in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("**/*.md")):
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text())
        missing = [link for link in links if not (file.parent / link).exists()]
        assert missing == [], f"{file} links to {missing}"
