"""Notebooks that run in a real kernel.

python -m tests.distributed.launch.notebooks docs/tutorials/two-gpus.ipynb

This runs a notebook, and puts what its cells show into it.
"""

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbclient
import nbformat

from tests.checks.tree import ROOT

_SECONDS = 240


def run(cells: Sequence[str], folder: Path) -> list[str]:
    """Runs cells in a kernel; returns what each shows: its text, and the names of its errors."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    execute(notebook, folder, allow_errors=True)
    return ["\n".join(map(shown, cell.outputs)) for cell in notebook.cells]


def execute(notebook: Any, folder: Path, **options: object) -> None:
    """Runs the cells of a notebook in `folder`, and puts what they show into it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    environment.pop("KERAS_BACKEND", None)
    client = nbclient.NotebookClient(
        notebook,
        timeout=_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        **options,
    )
    client.execute(env=environment)


def shown(output: Any) -> str:
    """Returns the text of an output, without the colours of a terminal."""
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def main(path: Path) -> None:
    """Runs a notebook in an empty folder, and writes it with what its cells show."""
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
