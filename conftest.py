"""The model that the examples in `shardcore.api` use, on a mesh of one device."""

import importlib
import inspect
import textwrap
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def example_of_api(
    request: pytest.FixtureRequest, doctest_namespace: dict[str, object]
) -> Iterator[None]:
    """Sets up what the docstring of `shardcore.api` shows, for the doctests of that module only."""
    test = getattr(request.node, "dtest", None)
    if test is None or not test.name.startswith("shardcore.api."):
        yield
        return
    import shardcore

    documented = inspect.getdoc(importlib.import_module("shardcore.api")) or ""
    setup = textwrap.dedent(documented.partition("::")[2])
    exec(setup, doctest_namespace)
    try:
        yield
    finally:
        shardcore.uninstall()
        doctest_namespace.clear()
