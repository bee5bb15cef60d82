"""Names say what they hold: loops and results are not called `each` and `found`."""

import ast
from collections.abc import Iterator

from tests.checks.tree import ROOT

SOURCE = ROOT / "src" / "shardcore"
EMPTY = frozenset({"each", "found"})


def bound_names(source: str) -> Iterator[tuple[str, int]]:
    """Yields each name that code assigns, loops over or takes as a parameter, and its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def test_no_name_in_the_source_is_empty():
    empty = [
        f"{file.relative_to(ROOT)}:{line}: call `{name}` what it holds"
        for file in sorted(SOURCE.rglob("*.py"))
        for name, line in bound_names(file.read_text())
        if name in EMPTY
    ]
    assert empty == []


def test_the_check_bites():
    source = "def f(found):\n    return [each for each in found]\n"
    assert sorted(name for name, _ in bound_names(source) if name in EMPTY) == ["each", "found"]
