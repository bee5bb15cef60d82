"""The lane of Keras on JAX has an environment without torch and shardcore."""

import ast
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "benchmarks"
ABSENT = {"torch", "shardcore"}


def imported(module: str) -> set[str]:
    """The dotted names that a module of benchmarks imports as it is imported."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def closure(modules: set[str]) -> set[str]:
    """All that these modules of benchmarks import, directly or by others of benchmarks."""
    seen: set[str] = set()
    left, external = set(modules), set[str]()
    while left:
        module = left.pop()
        seen.add(module)
        for name in imported(module):
            first, _, rest = name.partition(".")
            if first == "benchmarks" and (FOLDER / f"{rest.partition('.')[0]}.py").exists():
                left |= {rest.partition(".")[0]} - seen
            else:
                external.add(first)
    return external


def test_what_a_rank_of_jax_imports_is_in_its_environment():
    assert closure({"jax_rank", "keras_training", "generation"}).isdisjoint(ABSENT)
    assert "torch" in closure({"clocks"})
