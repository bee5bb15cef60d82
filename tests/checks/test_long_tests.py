"""The tests that `make test` leaves out exist, so that the list leaves out no more than it says."""

import ast

from tests.checks.tree import ROOT
from tests.long_tests import LONG_TESTS


def test_each_name_is_that_of_a_test() -> None:
    for name in LONG_TESTS:
        path, test = name.partition("[")[0].split("::")
        (file,) = (folder / path for folder in FOLDERS if (folder / path).is_file())
        functions = ast.walk(ast.parse(file.read_text()))
        assert any(isinstance(f, ast.FunctionDef) and f.name == test for f in functions), name


FOLDERS = (ROOT / "tests", ROOT / "tests" / "distributed")
