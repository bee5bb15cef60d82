"""The effects of `import shardcore`."""

import ast
import subprocess
import sys
from pathlib import Path

import shardcore


def test_import_loads_no_framework() -> None:
    program = (
        "import sys, shardcore\n"
        "print(*sorted({'torch', 'keras', 'numpy', 'rich', 'pluggy'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


def test_the_table_of_public_names_is_what_type_checkers_read() -> None:
    """A name in one of the two lists only would be missing at run time, or for mypy."""
    source = ast.parse(Path(shardcore.__file__).read_text())
    imports = [node for node in ast.walk(source) if isinstance(node, ast.ImportFrom)]
    typed = {
        (node.module, alias.name)
        for node in imports
        if node.module and node.module.endswith("api")
        for alias in node.names
        if alias.asname == alias.name
    }
    table = {(f"shardcore.{module}", name) for name, module in shardcore._MODULE_OF.items()}
    assert typed == table
