"""Parameters have types: few name `Any`, and none is exactly `Any` in ports, API and pure core."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checks.tree import ROOT

SOURCE = ROOT / "src" / "shardcore"
UNTYPED = ("adapters", "binding")  # they handle what torch and Keras do not type
ANY = ("Any", "typing.Any")
MOST = 0.07  # of all parameters, those whose type may name `Any`, as `list[Any]` does


def files() -> Iterator[Path]:
    for file in sorted(SOURCE.rglob("*.py")):
        if file.relative_to(SOURCE).parts[0] not in UNTYPED:
            yield file


def parameters(source: str) -> Iterator[tuple[str, str]]:
    """Yields each parameter, such as "plan(mesh)", and its type."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = node.args
            named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
            for each in named:
                annotation = each and each.annotation
                if annotation:
                    yield f"{node.name}({each.arg})", ast.unparse(annotation)


def parameters_that_are_any(source: str) -> list[str]:
    return [name for name, kind in parameters(source) if kind in ANY]


def names_any(kind: str) -> bool:
    return re.search(r"\bAny\b", kind) is not None


def other_names_of_any(source: str) -> list[str]:
    """Returns the aliases that are exactly `Any`: they would hide it from this check."""
    return [
        ast.unparse(node).partition(" ")[0].rstrip(":")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value is not None
        and ast.unparse(node.value) in ANY
    ]


@pytest.mark.parametrize("file", list(files()), ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_parameter_is_any(file):
    assert not parameters_that_are_any(file.read_text())


def test_few_parameters_name_any():
    sources = [file.read_text() for file in SOURCE.rglob("*.py")]
    found = [names_any(kind) for source in sources for _, kind in parameters(source)]
    assert sum(found) <= MOST * len(found), f"{sum(found)} of {len(found)} parameters name Any"


def test_any_has_no_other_name():
    assert not [
        name for file in SOURCE.rglob("*.py") for name in other_names_of_any(file.read_text())
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a: Any, *b: typing.Any, c: int, **d: Any): ...", ["f(a)", "f(b)", "f(d)"]),
        ("class C:\n async def g(self, a: list[Any]) -> Any: ...", []),
    ],
)
def test_the_check_bites(source, expected):
    assert parameters_that_are_any(source) == expected


def test_any_in_a_container_and_behind_a_name_is_seen():
    assert [*map(names_any, ("Any", "dict[str, typing.Any] | None", "Many"))] == [True, True, False]
    assert other_names_of_any("Json = Any\nOther: TypeAlias = Any\nx = 1") == ["Json", "Other"]
