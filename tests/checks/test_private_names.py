"""Private names of Keras and torch are written in one package each.

ruff bans the private modules by a list, and import-linter sees no further than `keras` and
`torch`; this reads every import of the package and holds the rule itself: below torch, no part of
a name starts with an underscore; below Keras, nothing comes from `keras.src`.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.checks.tree import ROOT

PACKAGE = ROOT / "src" / "shardcore"
MAY_NAME_PRIVATE_TORCH = "adapters/torch_compat/"
MAY_NAME_PRIVATE_KERAS = "binding/seams/"


def imported_names(source: str) -> Iterator[str]:
    """Every dotted name that the source imports, wherever it does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_private_torch(name: str) -> bool:
    root, *rest = name.split(".")
    return root == "torch" and any(part.startswith("_") for part in rest)


def is_private_keras(name: str) -> bool:
    return name == "keras.src" or name.startswith("keras.src.")


@pytest.mark.parametrize(
    ("is_private", "allowed"),
    [
        pytest.param(is_private_torch, MAY_NAME_PRIVATE_TORCH, id="torch"),
        pytest.param(is_private_keras, MAY_NAME_PRIVATE_KERAS, id="keras"),
    ],
)
def test_private_names_stand_in_one_package(is_private, allowed) -> None:
    found = {
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in PACKAGE.rglob("*.py")
        if not file.relative_to(PACKAGE).as_posix().startswith(allowed)
        for name in imported_names(file.read_text())
        if is_private(name)
    }
    assert not found, f"only {allowed} may name these: {sorted(found)}"


@pytest.mark.parametrize(
    "source",
    [
        "import torch._higher_order_ops.flex_attention",
        "from torch import _C",
        "from torch.distributed.tensor._utils import compute_local_shape",
        "from torch.distributed.distributed_c10d import _world",
        "def f():\n    from torch.distributed import _tensor as t",
    ],
)
def test_private_torch_is_seen(source: str) -> None:
    assert any(is_private_torch(name) for name in imported_names(source))


@pytest.mark.parametrize(
    "source", ["import keras.src", "from keras import src", "from keras.src.backend import common"]
)
def test_private_keras_is_seen(source: str) -> None:
    assert any(is_private_keras(name) for name in imported_names(source))


@pytest.mark.parametrize(
    "source", ["import torch.distributed.tensor as dt", "from keras import ops, _x", "import attrs"]
)
def test_public_names_pass(source: str) -> None:
    names = list(imported_names(source))
    assert not any(is_private_torch(name) or is_private_keras(name) for name in names)
