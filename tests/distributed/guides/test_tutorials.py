"""The commands of the tutorials and how-to pages run, and print what the pages show.

A page is a session in one folder. A `python` block with a title is a file, a line that begins with
`$` in a `console` block is a command, and a `text` block has lines that the commands before it
print; `...` stands for any text.
"""

import contextlib
import os
import re
import runpy
import shlex
import socket
import sys

import attrs
import pytest

from shardcore import cli
from shardcore.testing import run_ranks
from tests import warm
from tests.checks.tree import ROOT

DOCS = ROOT / "docs"
BLOCK = re.compile(r'^```(python title="(?P<file>[^"]+)"|console|text)\n(.*?)^```$', re.M | re.S)
PAGES = sorted(
    str(page.relative_to(DOCS))
    for page in DOCS.rglob("*.md")
    if '```python title="' in page.read_text()
)
LAUNCHED = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def blocks(page):
    return list(BLOCK.finditer((DOCS / page).read_text()))


@attrs.frozen
class Command:
    """A line of a page, as `A=1 torchrun --nproc_per_node=2 FILE`, `python FILE`, `shardcore`."""

    environment: dict[str, str]
    ranks: int
    is_launched: bool
    words: list[str]

    @classmethod
    def parse(cls, line):
        words = shlex.split(line)
        assignments = [word for word in words if re.match(r"[A-Z_]+=", word)]
        program, *words = words[len(assignments) :]
        environment = dict(word.split("=", 1) for word in assignments)
        if program == "torchrun":
            ranks = int(words.pop(0).removeprefix("--nproc_per_node="))
            return cls(environment, ranks, True, words)
        assert program in ("python", "shardcore"), line
        return cls(environment, 1, False, words if program == "python" else [program, *words])

    def run(self, folder):
        """Runs it on ranks forked from this process; returns what they printed."""
        for rank in range(self.ranks):
            (folder / f"rank-{rank}").write_text("")
        run_ranks(self._program, self.ranks, folder, init=False, timeout=200)
        return "".join((folder / f"rank-{rank}").read_text() for rank in range(self.ranks))

    def _program(self, rank, folder):
        os.environ.pop("SHARDCORE_CAPTURE", None)  # of the tests
        os.environ.update(self.environment)
        if not self.is_launched:
            for name in LAUNCHED:
                os.environ.pop(name, None)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        sys.argv = self.words
        with (
            open(f"rank-{rank}", "w") as output,
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            try:
                if self.words[0] == "shardcore":
                    assert cli.main(self.words[1:]) == 0
                else:
                    runpy.run_path(self.words[0], run_name="__main__")
            except SystemExit as end:
                if end.code:
                    raise


def is_printed(line, printed):
    pattern = ".*".join(re.escape(part) for part in line.strip().split("..."))
    return re.search(pattern, printed) is not None


def test_every_tutorial_has_files():
    tutorials = {page for page in PAGES if page.startswith("tutorials/")}
    assert tutorials == {str(page.relative_to(DOCS)) for page in DOCS.glob("tutorials/*.md")}


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_the_page_print_what_it_shows(page, tmp_path):
    for block in blocks(page):
        if block["file"]:
            (tmp_path / block["file"]).write_text(block[3])
    printed = ""
    for block in blocks(page):
        if block[1] == "console":
            lines = re.findall(r"^\$ (.*?)(?: +#.*)?$", block[3], re.MULTILINE)
            printed = "".join(Command.parse(line).run(tmp_path) for line in lines)
        elif block[1] == "text" and printed:
            missing = [line for line in block[3].splitlines() if not is_printed(line, printed)]
            assert missing == [], f"{page}: {printed}"
            printed = ""


# --- several hosts --------------------------------------------------------------------------------

MULTI_NODE = (DOCS / "how-to/multi-node.md").read_text()
(FIRST,) = (block[3] for block in blocks("tutorials/first-model.md") if block["file"] == "first.py")
LOSSES = "mesh (2,), losses 0.1549, 0.0703, 0.0453"


@pytest.fixture
def hosts(tmp_path):
    """Starts two commands, as on two hosts, on this machine; returns what both printed."""
    (tmp_path / "train.py").write_text(FIRST)
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}

    def start(command, **variables):
        program, *words = command.split()
        start = {"python": warm.Program, "torchrun": warm.start_torchrun}[program]
        return start(words, environment | variables, tmp_path)

    def run(*starts):
        started = [start(command, **variables) for command, variables in starts]
        printed = [process.communicate(timeout=240) for process in started]
        assert [process.returncode for process in started] == [0, 0], printed
        return "".join(map("".join, printed))

    return run


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def test_torchrun_joins_the_processes_of_two_hosts(hosts):
    (command,) = re.findall(r"^\$ (torchrun .* train\.py)$", MULTI_NODE, re.MULTILINE)
    command = command.replace("host0:29400", f"localhost:{free_port()}")
    command = command.replace("--nproc_per_node=4", "--nproc_per_node=1")
    assert LOSSES in hosts((command, {}), (command, {}))


def test_variables_join_the_processes_of_two_hosts(hosts):
    names = re.findall(r"^\| `(KERAS_DISTRIBUTION_\w+)`", MULTI_NODE, re.MULTILINE)
    addresses = f"localhost:{free_port()},localhost:{free_port()}"
    ranks = [dict(zip(names, (addresses, "2", rank), strict=True)) for rank in "01"]
    assert LOSSES in hosts(*(("python train.py", variables) for variables in ranks))
