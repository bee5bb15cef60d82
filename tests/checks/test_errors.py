"""Every error that shardcore raises on purpose derives from `ShardcoreError`, or is `ControlFlow`.

This reads each class and each call of the package. Two kinds of Python's own errors may be made
here: `AssertionError`, which says that shardcore itself is wrong, and the `AttributeError` of a
module's `__getattr__`, by which Python asks for a name.

And nothing goes to a terminal or into the log around `domain.errors.printable`: errors clean their
message, `reporting.logs.log_of` makes the logs, and a few functions print what they have cleaned.
"""

import ast
import builtins
from collections.abc import Iterable, Iterator

import pytest

from shardcore import ShardcoreError
from shardcore.domain.errors import ControlFlow
from tests.checks.tree import ROOT

PACKAGE = ROOT / "src" / "shardcore"
ROOT_NAME = ShardcoreError.__name__
BUILTIN = {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}


def last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`; nothing of what has no name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def outside_the_root(trees: Iterable[ast.Module]) -> set[str]:
    """The classes that derive from an error of Python, and not from the root."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    bases = {
        node.name: {last_name(base) for base in node.bases}
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    errors, ours = set(BUILTIN), {ROOT_NAME, ControlFlow.__name__}
    for _ in bases:  # each time at least one generation more
        errors |= {name for name, its in bases.items() if its & errors}
        ours |= {name for name, its in bases.items() if its & ours}
    return errors - ours - BUILTIN


def pythons_errors(tree: ast.Module) -> Iterator[str]:
    """The errors of Python that are made or raised by name, and that are none of the two kinds."""
    asked_by_python = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name == "__getattr__"
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        made = node.func if isinstance(node, ast.Call) else getattr(node, "exc", None)
        name = made.id if isinstance(made, ast.Name) else ""
        allowed = name == "AssertionError" or (name == "AttributeError" and node in asked_by_python)
        if name in BUILTIN and not allowed:
            yield f"line {node.lineno}: {name}"


def test_every_error_is_under_the_root() -> None:
    files = list(PACKAGE.rglob("*.py"))
    assert not outside_the_root(ast.parse(file.read_text()) for file in files)
    found = {
        f"{file.relative_to(PACKAGE)}, {what}"
        for file in files
        for what in pythons_errors(ast.parse(file.read_text()))
    }
    assert not found, f"raise a child of {ROOT_NAME} instead: {sorted(found)}"


@pytest.mark.parametrize(
    "source",
    [
        "class MineError(Exception): pass",
        "class Quiet(BaseException): pass",
        "class A(B): pass\nclass B(C): pass\nclass C(ValueError): pass",
        "def f():\n    class Local(errors.RuntimeError): pass",
    ],
)
def test_a_class_outside_the_root_is_seen(source: str) -> None:
    assert outside_the_root([ast.parse(source)])


@pytest.mark.parametrize(
    "source",
    [
        "raise RuntimeError('no')",
        "raise NotImplementedError",
        "def f():\n    return ValueError('raised by who calls')",
        "def __getattr__(name):\n    raise KeyError(name)",
        "def f(name):\n    raise AttributeError(name)",
    ],
)
def test_an_error_of_python_is_seen(source: str) -> None:
    assert list(pythons_errors(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        f"class MineError({ROOT_NAME}, ValueError): pass\nraise MineError('no')",
        f"class A(B): pass\nclass B(errors.{ROOT_NAME}): pass",
        "def __getattr__(name):\n    raise AttributeError(name)",
        "try:\n    f()\nexcept ValueError:\n    raise",
        "raise AssertionError('a mistake of our own')",
    ],
)
def test_errors_under_the_root_class_pass_the_check(source: str) -> None:
    tree = ast.parse(source)
    assert not outside_the_root([tree])
    assert not list(pythons_errors(tree))


# The functions that print, or make a log, each with its reason.
ALLOWED = {
    "binding/capture/python_state/walk.py: getLogger in visit_environment": "reads users' loggers",
    "cli/__init__.py: sys.stdout.write in _print": "cleans what it prints",
    "reporting/errors.py: sys.stderr.write in say": "likewise",
    "reporting/errors.py: getLogger in _strip": "asks for the level",
    "reporting/tables.py: print in text": "prints into a text",
    "reporting/logs.py: getLogger in configure": "sets the log up",
    "reporting/logs.py: getLogger in log_of": "makes the log that cleans",
}
WAYS = ("print", "getLogger", "sys.stdout.write", "sys.stderr.write", "warnings.warn")


def ways_around(source, name):
    """Returns the calls in a module that write to a terminal or a log by themselves."""
    found = set()

    def visit(node, function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            way = next((way for way in WAYS if called == way or called.endswith(f".{way}")), None)
            if way is not None:
                found.add(f"{name}: {way} in {function}")
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "the module")
    return found


def test_no_module_goes_around_the_function_that_cleans():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        found |= ways_around(path.read_text(), path.relative_to(PACKAGE).as_posix())
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "line",
    [
        "print(path)",
        "logging.getLogger('shardcore').warning(path)",
        "sys.stderr.write(path)",
        "import warnings\nwarnings.warn(path)",
    ],
)
def test_the_check_of_ways_around_bites(line):
    assert ways_around(f"def show(path):\n    {line.splitlines()[-1]}", "module.py")
