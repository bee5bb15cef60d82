"""Prints what the self-check of `install()` finds here, and the strategy; runs in an environment.

Beside the self-check, which ends at the first module that cannot be imported, it looks up every
private name of Keras that the patches import.
"""

import ast
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import shardcore
from shardcore.bootstrap import environment, self_check

PRIVATE = Path(shardcore.__file__).parent / "binding" / "keras_private"


def main() -> None:
    """Prints versions, strategy and problems as JSON, in the last line."""
    broken = [*dict.fromkeys([*self_check.problems(), *moved_names_of_keras()])]
    found = {"versions": environment.versions(), "broken": broken}
    try:
        status = shardcore.install()
        found |= {"strategy": status.strategy, "passed_over": status.passed_over}
    except (shardcore.ShardcoreError, ImportError) as error:
        found |= {"error": str(error)}
    sys.stdout.write(f"\n{json.dumps(found)}\n")


def moved_names_of_keras() -> Iterator[str]:
    """The private names of Keras that the patches import, and that are not there."""
    for file in sorted(PRIVATE.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            module = (node.module if isinstance(node, ast.ImportFrom) else None) or ""
            if module.startswith("keras.src"):
                for each in node.names:
                    if not is_there(module, each.name):
                        yield f"Keras has no {module}:{each.name}"


def is_there(module: str, name: str) -> bool:
    """Whether a module has the name, or a submodule of that name."""
    try:
        return hasattr(importlib.import_module(module), name) or bool(
            importlib.util.find_spec(f"{module}.{name}")
        )
    except ImportError:
        return False


if __name__ == "__main__":
    main()
