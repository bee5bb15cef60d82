"""The model that the examples of the public functions use, on a mesh of one device.

`shardcore.api` shows it. The examples in `shardcore.checkpoint_api` use a checkpoint of it too.
"""

import importlib
import inspect
import textwrap
from collections.abc import Iterator

import pytest

from tests import line_coverage

line_coverage.measure()

MODULES = tuple(
    f"shardcore.{name}"
    for name in ("api", "callback_api", "checkpoint_api", "files_api", "plan_api", "tensor_api")
)


@pytest.fixture(autouse=True)
def example_of_api(
    request: pytest.FixtureRequest, doctest_namespace: dict[str, object]
) -> Iterator[None]:
    """Sets up what the docstrings of these modules show, for the doctests of them only."""
    test = getattr(request.node, "dtest", None)
    module = "" if test is None else test.name.rpartition(".")[0]
    if module not in MODULES:
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
