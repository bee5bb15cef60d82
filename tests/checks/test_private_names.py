"""Private names of Keras and torch are written in one package each, those of torch in a file too.

ruff bans the private modules by a list, and import-linter sees no further than `keras` and
`torch`; this reads the syntax tree of every module and holds the rule itself. Of Keras it reads
imports (nothing comes from `keras.src`), attributes and strings; of these a function gives names
to `@replaces`. Of torch it reads overrides too, and compares all with `private_names.toml`, which
says of each why it is used, in which releases it is known, and what would make it unnecessary. The
self-check of `install()` finds all.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from shardcore.bootstrap.self_check import missing
from tests.checks.private_torch import own_names, uses
from tests.checks.tree import ROOT

PACKAGE = ROOT / "src" / "shardcore"
MAY_NAME_PRIVATE_TORCH = "adapters/torch_private/"
MAY_NAME_PRIVATE_KERAS = "binding/keras_private/"
# The decorators whose arguments are names of Keras.
DECLARATIONS = {"replaces", "replaces_value"}
FILE = PACKAGE / MAY_NAME_PRIVATE_TORCH / "private_names.toml"
ENTRY = {"why", "known", "until"}
# Strings of `binding` that are ends of names.
NO_ATTRIBUTES = {"_step", "_function", "_begin", "_on_batch", "_ns"}
# Names of Python's own, which the rule of captured steps lists; `sys._getframe` is documented.
OF_PYTHON = {*sys.stdlib_module_names, "_lru_list_elem", "_tuple_new", "_find_and_load_unlocked"}
OF_PYTHON |= {"_getframe"}
# Of all private names, and of those of torch.distributed.tensor. Eight are operators of CUDA, which
# no run on a CPU finds. Two are the hooks of a tensor, which guards compare. One gathers on gloo
# without corrupting the heap. Two list the modes, and one the hooks of saved tensors, within which
# no step is captured. One numbers the states of a dict, for guards.
MOST = 54
MOST_OF_DTENSOR = 8
OF_DTENSOR = {"_dtensor", "_local_tensor", "_spec"}


def entries() -> dict[str, dict[str, Any]]:
    """The private names in the file, and what it says of each."""
    kinds = tomllib.loads(FILE.read_text())
    return {name: entry for kind in kinds.values() for name, entry in kind.items()}


def trees() -> dict[str, ast.Module]:
    """Every module of the package, by its path."""
    return {
        file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text())
        for file in PACKAGE.rglob("*.py")
    }


def used_names() -> dict[str, set[str]]:
    """The modules that use each private name of torch."""
    parsed = trees()
    own = {name for tree in parsed.values() for name in own_names(tree)}
    found: dict[str, set[str]] = {}
    for path, tree in parsed.items():
        for name in uses(tree, own, of_keras=not path.startswith("adapters/")):
            found.setdefault(name, set()).add(path)
    return found


def test_every_private_name_of_torch_is_in_the_file_and_in_its_place() -> None:
    known = entries()
    for name, paths in used_names().items():
        assert name in known, f"{name}, in {sorted(paths)}, is not in {FILE.name}: is it needed?"
        place = known[name].get("place", MAY_NAME_PRIVATE_TORCH)
        strays = sorted(path for path in paths if not path.startswith(place))
        assert not strays, f"{name} may be named in {place} only, and is in {strays}"


def test_every_entry_of_the_file_is_used_and_complete() -> None:
    unused = entries().keys() - used_names().keys()
    assert not unused, f"no module uses {sorted(unused)}: take the entry out of {FILE.name}"
    for name, entry in entries().items():
        assert entry.keys() - {"place", "of", "part"} == ENTRY, f"{name} needs {sorted(ENTRY)}"
        assert all(entry.values()), f"{name} has an empty field"


def test_the_self_check_finds_every_entry_of_the_file() -> None:
    assert list(missing(tomllib.loads(FILE.read_text()))) == []


def test_private_names_of_torch_are_few() -> None:
    names = entries().keys()
    of_dtensor = {
        name for name in names if name in OF_DTENSOR or name.startswith("torch.distributed.tensor.")
    }
    assert len(names) <= MOST, f"{len(names)} private names of torch"
    assert len(of_dtensor) <= MOST_OF_DTENSOR, sorted(of_dtensor)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._higher_order_ops.flex_attention", "torch._higher_order_ops.flex_attention"),
        ("from torch import _C", "torch._C"),
        ("from torch.distributed.distributed_c10d import _world", "torch.distributed.*._world"),
        ("def f():\n    from torch.distributed import _tensor as t", "torch.distributed._tensor"),
        ("import torch\ntorch._C._get_tracing_state()", "torch._C._get_tracing_state"),
        ("import torch as t\nt._C.Graph()", "torch._C.Graph"),
        ("import torch\ntorch._dynamo.reset()", "torch._dynamo.reset"),
        (
            "from torch import autograd\nautograd._get_sequence_nr()",
            "torch.autograd._get_sequence_nr",
        ),
        ("import torch\ntorch.ops.aten._softmax.default", "aten::_softmax"),
        ("aten._foreach_add_.List", "aten::_foreach_add_"),
        ("import torch\ntorch.ops._c10d_functional.broadcast", "_c10d_functional::broadcast"),
        ("def f(x):\n    return x._base", "_base"),
        ("def f(x):\n    return x.made()._op_dispatcher", "_op_dispatcher"),
        ("def f(x):\n    return getattr(x, '_spec', None)", "_spec"),
        ("def f(x):\n    return vars(x)['_resolve']", "_resolve"),
        ("class A(B):\n    def _local_tensor(self): ...", "_local_tensor"),
        ("NAMES = ('aten::_foreach_add', 'b')", "aten::_foreach_add"),
        ("MODULE = 'torch._inductor.config'", "torch._inductor.config"),
    ],
)
def test_a_private_name_of_torch_is_seen(source: str, name: str) -> None:
    found = uses(ast.parse(source), set())
    assert name.replace("*", "distributed_c10d") in found


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed.tensor as dt\ndt.DTensor",
        "import torch\ntorch.ops.aten.add.Tensor",
        "import torch\ntorch.Tensor.__torch_function__",
        "class A:\n    def f(self):\n        return self._spec",
        "class A:\n    def _mine(self): ...\ndef f(a):\n    return a._mine()",
        '"""Of `torch._C`, which is private, only a docstring tells."""',
    ],
)
def test_public_names_pass_the_check(source: str) -> None:
    tree = ast.parse(source)
    assert not uses(tree, set(own_names(tree)))


def imported_names(source: str) -> Iterator[str]:
    """Every dotted name that the source imports, wherever it does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_private_keras(name: str) -> bool:
    return name == "keras.src" or name.startswith("keras.src.")


def test_private_names_of_keras_stand_in_one_package() -> None:
    found = {
        f"{path} imports {name}"
        for path in trees()
        if not path.startswith(MAY_NAME_PRIVATE_KERAS)
        for name in imported_names((PACKAGE / path).read_text())
        if is_private_keras(name)
    }
    assert not found, f"only {MAY_NAME_PRIVATE_KERAS} may name these: {sorted(found)}"


def private_attributes(tree: ast.Module) -> Iterator[str]:
    """Every private attribute of an object of others that a module reads or sets, strings too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            name = "" if is_own else node.attr
        else:
            is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
            name = node.value if is_string else ""
        if re.fullmatch(r"_[a-z]\w*", name) and not name.startswith("_shardcore_"):
            yield name


def test_private_attributes_of_keras_stand_in_one_package() -> None:
    found = {
        f"{path} names {name}"
        for path, tree in trees().items()
        if path.startswith("binding/") and not path.startswith(MAY_NAME_PRIVATE_KERAS)
        for name in set(private_attributes(tree)) - NO_ATTRIBUTES - OF_PYTHON
    }
    assert not found, f"only {MAY_NAME_PRIVATE_KERAS} may name these: {sorted(found)}"


@pytest.mark.parametrize(
    "source",
    [
        "model._layers",
        "x.y._value = 1",
        "getattr(a, '_layout', None)",
        "for key in ('_value',): ...",
    ],
)
def test_a_private_attribute_is_seen(source: str) -> None:
    assert list(private_attributes(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["self._layers", "x._shardcore_rule", "'a _value'", "x.__dict__", "_own(x)"]
)
def test_attributes_of_ours_pass(source: str) -> None:
    assert not list(private_attributes(ast.parse(source)))


def strings_of_keras(tree: ast.Module) -> Iterator[str]:
    """Every string that names a module of `keras.src`, but the names that `@replaces` gets."""
    allowed = {
        string
        for function in ast.walk(tree)
        for decorator in getattr(function, "decorator_list", ())
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in DECLARATIONS
        for string in decorator.args
    }
    allowed |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_string and "keras.src" in node.value and node not in allowed:
            yield node.value


def test_strings_name_private_modules_of_keras_only_to_replace_them() -> None:
    found = {
        f"{path} names {string}"
        for path, tree in trees().items()
        if not path.startswith(MAY_NAME_PRIVATE_KERAS)
        for string in strings_of_keras(tree)
    }
    assert not found, f"only `@replaces` may get these: {sorted(found)}"


@pytest.mark.parametrize(
    "source",
    [
        "find('keras.src.utils:a')",
        "@replaces('a', reason='keras.src.utils')\ndef f(original): ...",
        "@other('keras.src.utils:a')\ndef f(original): ...",
        "replaces('keras.src.utils:a', reason='')(f)",
        "@replaces(*('keras.src.utils:a',), reason='')\ndef f(original): ...",
        "f'keras.src.{name}'",
    ],
)
def test_a_private_module_in_a_string_is_seen(source: str) -> None:
    assert list(strings_of_keras(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "@replaces('keras.src.utils:a', 'keras.src.utils:b', reason='')\ndef f(original): ...",
        "class A:\n    @replaces_value('keras.src.utils:a')\n    def f(self, original): ...",
        "def f():\n    'Of `keras.src`.'",
    ],
)
def test_the_names_that_a_function_replaces_pass(source: str) -> None:
    assert not list(strings_of_keras(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["import keras.src", "from keras import src", "from keras.src.backend import common"]
)
def test_private_keras_is_seen(source: str) -> None:
    assert any(is_private_keras(name) for name in imported_names(source))


@pytest.mark.parametrize("source", ["from keras import ops, _x", "import attrs"])
def test_public_names_of_keras_pass(source: str) -> None:
    assert not any(is_private_keras(name) for name in imported_names(source))
