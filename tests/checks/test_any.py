"""Parameters have types: none is exactly `Any` in ports, the public API and the pure core."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checks.tree import ROOT

SOURCE = ROOT / "src" / "shardcore"
UNTYPED = ("adapters", "binding")  # they handle what torch and Keras do not type
ANY = ("Any", "typing.Any")
MOST = 0.06  # of all parameters, those that may be exactly `Any`


def files() -> Iterator[Path]:
    for file in sorted(SOURCE.rglob("*.py")):
        if file.relative_to(SOURCE).parts[0] not in UNTYPED:
            yield file


def parameters(source: str) -> Iterator[tuple[str, bool]]:
    """Yields each parameter, such as "plan(mesh)", and whether its type is exactly `Any`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = node.args
            named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
            for each in named:
                annotation = each and each.annotation
                if annotation:
                    yield f"{node.name}({each.arg})", ast.unparse(annotation) in ANY


def parameters_that_are_any(source: str) -> list[str]:
    return [name for name, is_any in parameters(source) if is_any]


@pytest.mark.parametrize("file", list(files()), ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_parameter_is_any(file):
    assert not parameters_that_are_any(file.read_text())


def test_few_parameters_are_any():
    sources = [file.read_text() for file in SOURCE.rglob("*.py")]
    found = [is_any for source in sources for _, is_any in parameters(source)]
    assert sum(found) <= MOST * len(found), f"{sum(found)} of {len(found)} parameters are Any"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a: Any, *b: typing.Any, c: int, **d: Any): ...", ["f(a)", "f(b)", "f(d)"]),
        ("class C:\n async def g(self, a: list[Any]) -> Any: ...", []),
    ],
)
def test_the_check_bites(source, expected):
    assert parameters_that_are_any(source) == expected
