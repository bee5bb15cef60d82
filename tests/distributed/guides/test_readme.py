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


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 90


def test_every_make_command_is_in_the_makefile():
    commands = set(re.findall(r"`make (\w+)`", README))
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert commands == {"demo", "test"}
    assert commands <= targets


PAGES = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")]


def test_every_link_leads_to_a_file():
    for file in (*PAGES, *(ROOT / "docs").glob("**/*.md")):
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text())
        missing = [link for link in links if not (file.parent / link).exists()]
        assert missing == [], f"{file} links to {missing}"


def test_contributing_names_files_and_targets_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:src|tests|docs|examples)/[\w./-]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    assert [
        name for name in re.findall(r"`make ([\w-]+)`", text) if f"\n{name}:" not in makefile
    ] == []
