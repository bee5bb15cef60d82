"""Ports, the public API and the pure core are typed: no parameter is exactly `Any`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checks.tree import ROOT

SOURCE = ROOT / "src" / "shardcore"
UNTYPED = ("adapters", "binding")  # they handle what torch and Keras do not type


def files() -> Iterator[Path]:
    for file in sorted(SOURCE.rglob("*.py")):
        if file.relative_to(SOURCE).parts[0] not in UNTYPED:
            yield file


def parameters_that_are_any(source: str) -> Iterator[str]:
    """Yields each parameter whose annotation is exactly `Any`, such as "plan(mesh)"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = node.args
            named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
            for each in named:
                annotation = each and each.annotation
                if annotation and ast.unparse(annotation) in ("Any", "typing.Any"):
                    yield f"{node.name}({each.arg})"


@pytest.mark.parametrize("file", list(files()), ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_parameter_is_any(file):
    assert not list(parameters_that_are_any(file.read_text()))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a: Any, *b: typing.Any, c: int, **d: Any): ...", ["f(a)", "f(b)", "f(d)"]),
        ("class C:\n async def g(self, a: list[Any]) -> Any: ...", []),
    ],
)
def test_the_check_bites(source, expected):
    assert list(parameters_that_are_any(source)) == expected
