"""Nothing goes to a terminal, or into the log, around `domain.errors.printable`.

Logs are made by `reporting.logs.log_of`, errors are of `ShardcoreError`, which cleans its message,
and a few functions print, after they have cleaned. This reads each module for other ways.
"""

import ast

import pytest

from tests.checks.tree import ROOT

PACKAGE = ROOT / "src" / "shardcore"
# The functions that may, each with its reason.
ALLOWED = {
    "binding/captured/python_state/walk.py: getLogger in surroundings": "reads the user's loggers",
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
def test_the_check_bites(line):
    assert ways_around(f"def show(path):\n    {line.splitlines()[-1]}", "module.py")
