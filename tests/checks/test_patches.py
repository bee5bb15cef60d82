"""The table of patches has all that the source declares, each name once, and so has its page."""

import ast
from collections.abc import Iterator

import keras
import pytest

from shardcore.binding import patch_table
from shardcore.binding.keras_private.patches import replaced, replaces
from tests import patches
from tests.checks.tree import ROOT

SOURCE = ROOT / "src"
DECORATORS = ("replaces", "replaces_value")
# What a function may need before `original`: see `replaces`.
SERVICES = {"self", "sessions", "capture", "name"}
TABLE = (*patch_table.INSTALLED, *patch_table.TEMPORARY)


def declaring_functions(tree: ast.AST, path: str = "") -> Iterator[str]:
    """Yields the functions and methods that declare patches, within functions too."""
    for node in ast.iter_child_nodes(tree):
        name = getattr(node, "name", "")
        inner = f"{path}.{name}" if name else path
        decorators = getattr(node, "decorator_list", ())
        calls = [decorator for decorator in decorators if isinstance(decorator, ast.Call)]
        if any(ast.unparse(call.func).rpartition(".")[2] in DECORATORS for call in calls):
            yield inner
        yield from declaring_functions(node, inner)


def test_every_function_that_declares_a_patch_is_in_the_table():
    declaring = {
        function
        for file in SOURCE.rglob("*.py")
        for function in declaring_functions(
            ast.parse(file.read_text()),
            ".".join(file.relative_to(SOURCE).with_suffix("").parts),
        )
    }
    functions = {f"{row.function.__module__}.{row.function.__qualname__}" for row in TABLE}
    assert declaring == functions, "add its module to patch_table.py, or move it out of a function"


@pytest.mark.parametrize(
    "source",
    [
        '@replaces("a:b", reason="")\ndef f(original): ...',
        'class f:\n    @patches.replaces_value("a:b", reason="")\n    def g(self, original): ...',
        'def f():\n    @replaces("a:b", reason="")\n    def g(original): ...',
    ],
)
def test_a_declaration_is_seen(source):
    (function,) = declaring_functions(ast.parse(source), "m")
    assert function in ("m.f", "m.f.g")


def test_no_name_is_replaced_twice():
    keys = [row.patch.key for row in patch_table.INSTALLED]
    assert sorted(set(keys)) == sorted(keys)


def test_every_function_needs_what_the_installation_has():
    others = {
        f"{row.function.__qualname__} needs {row.needs}"
        for row in TABLE
        if row.needs != ("session",) and not set(row.needs) <= SERVICES
    }
    assert others == set()


def test_this_keras_has_every_name():
    assert patch_table.missing() == []


def test_a_name_that_keras_lacks_is_an_error_that_names_it_and_nothing_stays_replaced():
    @replaces("keras.src.utils.io_utils:print_msg", reason="There.")
    @replaces("keras.src.utils.io_utils:gone", reason="Not there.")
    def function(original):
        raise AssertionError

    before = keras.src.utils.io_utils.print_msg
    lost = r"'keras\.src\.utils\.io_utils' .* 'gone'"
    with pytest.raises(AttributeError, match=lost), replaced(function):
        raise AssertionError
    assert keras.src.utils.io_utils.print_msg is before


def test_the_page_has_the_table():
    assert patches.is_up_to_date(), "run python -m tests.patches"
