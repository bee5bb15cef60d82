"""The tutorial that is a notebook runs in a real kernel, and shows what is kept in it."""

import re

import nbformat
import torch

from tests.checks.tree import ROOT
from tests.distributed.launch.notebooks import execute, shown

NOTEBOOK = ROOT / "docs/tutorials/two-gpus.ipynb"
MOST_CELLS = 14


# On a slow machine shardcore says that recording takes long.
SLOW = re.compile(r"^\[shardcore rank \d+\] .* its first steps are recorded.*\n", re.MULTILINE)


def outputs(notebook):
    """Returns what each cell of code shows, without its numbers."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    texts = [SLOW.sub("", "".join(map(shown, cell.outputs))) for cell in cells]
    return [re.sub(r"[\d.]+", "#", text) for text in texts]


def test_the_notebook_runs_and_shows_what_it_keeps(tmp_path):
    kept = nbformat.read(NOTEBOOK, nbformat.NO_CONVERT)
    notebook = nbformat.read(NOTEBOOK, nbformat.NO_CONVERT)
    execute(notebook, tmp_path)
    assert len(notebook.cells) <= MOST_CELLS
    counts = [cell.execution_count for cell in kept.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    if not torch.cuda.is_available():
        assert outputs(notebook) == outputs(kept)
    printed = "".join(outputs(notebook))
    assert "equal losses" in printed
    (picture,) = (
        output.data["image/svg+xml"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/svg+xml" in output.get("data", {})
    )
    assert "hidden_1" in picture
