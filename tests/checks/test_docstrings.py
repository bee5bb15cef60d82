"""Every name of the public API says what it takes and what it gives, with an example.

The names are those of `shardcore.__all__` and of docs/reference/api.md. The examples are doctests,
which `make unit` runs.
"""

import importlib
import inspect
import re
from types import ModuleType

import pytest

import shardcore
from tests import measures
from tests.checks.tree import ROOT

API = (ROOT / "docs" / "reference" / "api.md").read_text()
# The root of the errors, which docs/reference/errors.md describes.
LEFT_OUT = {"ShardcoreError"}


def named(path: str) -> object:
    """Returns the object at a dotted path: a module, or a name in one."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


def missing(found: object) -> list[str]:
    """Returns what the docstring of a function or a class lacks."""
    text = inspect.getdoc(found) or ""
    lacks = [] if text else ["a docstring"]
    arguments = text.partition("Args:\n")[2] or text.partition("Attributes:\n")[2]
    taken = [each for each in inspect.signature(found).parameters if each != "self"]
    lacks += [f"argument {each}" for each in taken if not re.search(rf"\b{each}\b", arguments)]
    if inspect.isfunction(found) and found.__annotations__.get("return") not in (None, "None"):
        gives = re.match("(Returns|Yields)", text) or "Returns:\n" in text
        lacks += [] if gives else ["what it returns"]
    return lacks if ">>> " in text else [*lacks, "an example"]


def objects() -> dict[str, object]:
    """Returns the functions and classes, by name."""
    found = {name: getattr(shardcore, name) for name in set(shardcore.__all__) - LEFT_OUT}
    for path in re.findall(r"^::: ([\w.]+)$", API, re.MULTILINE):
        each = named(path)
        if not isinstance(each, ModuleType):
            found[path.rpartition(".")[2]] = each
    return found


@pytest.mark.parametrize("name", sorted(objects()))
def test_a_public_name_is_documented_with_an_example(name):
    assert missing(objects()[name]) == []


def test_what_a_docstring_lacks_is_seen():
    def bare(mesh, policy):
        """Plans.

        Args:
            mesh: The mesh.
        """

    assert missing(bare) == ["argument policy", "an example"]


def test_few_docstrings_begin_by_repeating_that_a_value_is_returned():
    texts = [text for module in measures.modules() for text in module.docstrings]
    assert sum(text.startswith(measures.RETURNS) for text in texts) <= len(texts) / 4
