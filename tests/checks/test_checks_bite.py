"""Each check fails on a planted violation and names it, and passes on the tree as it is."""

import sys
from pathlib import Path

import pytest

from tests.checks.tree import ROOT, Tree

RUFF = ("ruff", "check", "--no-cache", "--output-format=concise", "src")
MYPY = ("mypy", "--strict", "--no-incremental", "--follow-imports=skip", "src/shardcore/domain")
PYRIGHT = ("pyright", f"--pythonpath={sys.executable}")
IMPORTS = ("lint-imports", "--no-cache", "--no-logo")

# where, what, and what the report must name
BANNED_NAMES = [
    ("domain/planted.py", "import keras.src.backend", "keras.src"),
    ("binding/planted.py", "from keras.src import backend", "keras.src"),
    ("binding/planted.py", "from keras import src", "keras.src"),
    ("adapters/planted.py", "import torch._dynamo", "torch._dynamo"),
    ("adapters/planted.py", "from torch import _C", "torch._C"),
    (
        "adapters/planted.py",
        "from torch.distributed.tensor._utils import compute_local_shape_and_global_offset",
        "torch.distributed.tensor._utils",
    ),
    (
        "adapters/planted.py",
        "from torch.distributed.distributed_c10d import _get_default_group",
        "_get_default_group",
    ),
    ("strategies/planted.py", "import torch", "torch"),
    ("planted.py", "from shardcore.adapters import dtensor", "shardcore.adapters"),
    ("planted.py", "from .domain import mesh", "Prefer absolute imports"),
]

ALLOWED_NAMES = [
    ("binding/keras_private/planted.py", "import keras.src.backend"),
    ("adapters/torch_private/tensors.py", "from torch.distributed.tensor._utils import x as x"),
    ("adapters/planted.py", "import torch.distributed.tensor as x"),
    ("binding/planted.py", "import keras"),
]

# files, and the line of the report that names the forbidden import
FORBIDDEN_IMPORTS = {
    "domain imports torch": (
        {"domain/planted.py": "import torch"},
        "shardcore.domain.planted -> torch",
    ),
    "a strategy imports torch": (
        {"strategies/planted.py": "import torch"},
        "shardcore.strategies.planted -> torch",
    ),
    "a policy imports numpy": (
        {"policies/planted.py": "import numpy"},
        "shardcore.policies.planted -> numpy",
    ),
    "keras outside binding": (
        {"adapters/planted.py": "from keras.src import backend"},
        "shardcore.adapters.planted -> keras",
    ),
    "keras in testing, but for the promises": (
        {"testing/planted.py": "import keras"},
        "shardcore.testing.planted -> keras",
    ),
    "pluggy in a strategy": (
        {"strategies/planted.py": "import pluggy"},
        "shardcore.strategies.planted -> pluggy",
    ),
    "rich in the core": (
        {"domain/planted.py": "import rich"},
        "shardcore.domain.planted -> rich",
    ),
    "domain imports ports": (
        {"domain/planted.py": "import shardcore.ports.planted", "ports/planted.py": ""},
        "shardcore.domain.planted -> shardcore.ports.planted",
    ),
    "binding imports adapters": (
        {"binding/planted.py": "import shardcore.adapters.planted", "adapters/planted.py": ""},
        "shardcore.binding.planted -> shardcore.adapters.planted",
    ),
    "hidden inside a function": (
        {"ports/planted.py": "def f() -> None:\n    import torch"},
        "shardcore.ports.planted -> torch",
    ),
    "a module in no layer": ({"planted.py": ""}, "- shardcore.planted"),
    "strategies know each other": (
        {
            "strategies/planted_a.py": "import shardcore.strategies.planted_b",
            "strategies/planted_b.py": "",
        },
        "shardcore.strategies.planted_a -> shardcore.strategies.planted_b",
    ),
    "siblings in a cycle": (
        {
            "domain/planted_a.py": "import shardcore.domain.planted_b",
            "domain/planted_b.py": "import shardcore.domain.planted_a",
        },
        "planted_b",
    ),
}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A copy without violations."""
    return Tree.copy_to(tmp_path)


@pytest.mark.parametrize("command", [RUFF, MYPY, IMPORTS], ids=lambda command: command[0])
def test_the_tree_as_it_is_passes(tree: Tree, command: tuple[str, ...]) -> None:
    result = tree.run(*command)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("path", "source", "rule"), BANNED_NAMES)
def test_ruff_refuses_a_banned_name(tree: Tree, path: str, source: str, rule: str) -> None:
    tree.plant(f"src/shardcore/{path}", source + "\n")
    result = tree.run(*RUFF)
    assert result.returncode == 1, result.stdout + result.stderr
    reports = [line for line in result.stdout.splitlines() if f"shardcore/{path}:1:" in line]
    assert any(" TID25" in line and rule in line for line in reports), result.stdout


@pytest.mark.parametrize(("path", "source"), ALLOWED_NAMES)
def test_ruff_lets_the_one_place_name_it(tree: Tree, path: str, source: str) -> None:
    tree.plant(f"src/shardcore/{path}", source + "\n")
    result = tree.run(*RUFF, "--select=TID")
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_refuses_the_private_attribute_of_another_object(tree: Tree) -> None:
    path = "src/shardcore/adapters/planted.py"
    tree.plant(path, "def spec(tensor):\n    return tensor._spec\n")
    result = tree.run(*RUFF)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{path}:2:12: SLF001" in result.stdout


def test_mypy_refuses_an_untyped_function(tree: Tree) -> None:
    path = "src/shardcore/domain/planted.py"
    tree.plant(path, "def double(x):\n    return 2 * x\n")
    result = tree.run(*MYPY)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{path}:1" in result.stdout
    assert "no-untyped-def" in result.stdout


def test_pyright_refuses_a_plug_in_that_opens_no_strategy(tree: Tree) -> None:
    path = "examples/strategy-plugin/zero1_strategy.py"
    (tree.root / path).parent.mkdir(parents=True)
    source = (ROOT / path).read_text()
    (tree.root / path).write_text(source.replace("return open_dtensor(world, Zero1)", "return 3"))
    result = tree.run(*PYRIGHT)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "reportReturnType" in result.stdout


@pytest.mark.parametrize("violation", FORBIDDEN_IMPORTS)
def test_import_linter_refuses(tree: Tree, violation: str) -> None:
    files, report = FORBIDDEN_IMPORTS[violation]
    for path, source in files.items():
        tree.plant(f"src/shardcore/{path}", source + "\n")
    result = tree.run(*IMPORTS)
    assert result.returncode == 1, result.stdout + result.stderr
    assert report in result.stdout
