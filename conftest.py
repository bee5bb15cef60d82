"""The model that the examples in `shardcore.api` and `tensor_api` use, on a mesh of one device.

Those in `shardcore.checkpoint_api` use a checkpoint of it too.
"""

import importlib
import inspect
import textwrap
from collections.abc import Iterator

import pytest

from tests import line_coverage

line_coverage.measure()


@pytest.fixture(autouse=True)
def example_of_api(
    request: pytest.FixtureRequest, doctest_namespace: dict[str, object]
) -> Iterator[None]:
    """Sets up what the docstrings of these modules show, for the doctests of them only."""
    test = getattr(request.node, "dtest", None)
    module = "" if test is None else test.name.rpartition(".")[0]
    if module not in ("shardcore.api", "shardcore.checkpoint_api", "shardcore.tensor_api"):
        yield
        return
    import shardcore

    for each in dict.fromkeys(("shardcore.api", module)):
        documented = inspect.getdoc(importlib.import_module(each)) or ""
        exec(textwrap.dedent(documented.partition("::")[2]), doctest_namespace)
    try:
        yield
    finally:
        shardcore.uninstall()
        doctest_namespace.clear()
