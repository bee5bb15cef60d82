"""The private names of torch that a module of Python uses, read from its syntax tree."""

import ast
import re
from collections.abc import Callable, Iterator

import torch
from torch.distributed.tensor import DTensor

# Names with an underscore that Python, attrs and pluggy document, and those of Python's `atexit`.
DOCUMENTED = {"_fields", "_make", "_asdict", "_replace", "_getframe", "_current_frames"}
DOCUMENTED |= {"_clear", "_exit", "_run_exitfuncs"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in DOCUMENTED


def _members() -> set[str]:
    """The private members of the objects of torch that shardcore handles."""
    operator = torch.ops.aten.add.Tensor
    kinds = [
        *(DTensor, torch.Generator, torch.UntypedStorage, torch.autograd.Function),
        *(torch.autograd.graph.Node, torch.distributed.ProcessGroup, torch.fx.GraphModule),
        *(torch.nn.Parameter, torch.optim.Optimizer, type(operator), type(torch.ops.aten.add)),
    ]
    names = {name for kind in kinds for each in kind.__mro__ for name in vars(each)}
    names |= {*vars(torch.nn.Linear(1, 1)), *vars(operator)}
    return set(filter(is_private, names))


MEMBERS = _members()
_OPERATOR = re.compile(r"\b(\w+)::(\w*)")
_DOTTED = re.compile(r"\btorch(?:\.\w+)*\._\w+(?:\.\w+)*")


def own_names(tree: ast.Module) -> Iterator[str]:
    """The names that the source defines: functions, classes, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and _is_own(node) and isinstance(node.ctx, ast.Store):
            yield node.attr


def uses(tree: ast.Module, own: set[str], *, of_keras: bool = False) -> set[str]:
    """The private names of torch in a module: in imports, attributes, overrides and strings.

    A name is "torch._C._name" where the source says whose it is, "aten::_name" of an operator, and
    "_name" of an attribute of an object.

    Args:
        tree: The module.
        own: What `own_names` gives of the whole package: such an attribute may be of torch by its
            name, and is so only if torch has it.
        of_keras: Whether the module handles Keras objects too, whose attributes are not torch's.
    """
    imported = dict(_imports(tree))
    found = {name for name in imported.values() if _is_of_torch(name)}
    parts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    documentation = set(_docstrings(tree))

    def is_member(name: str) -> bool:
        return is_private(name) and (name in MEMBERS or not (of_keras or name in own))

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = _chain(node, imported)
            if chain[0] == "torch":
                found |= set() if node in parts else _named(chain)
            elif not _is_own(node) and is_member(node.attr):
                found.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            found |= {name for name in _overrides(node) if name in MEMBERS}
        elif isinstance(node, ast.Constant) and node not in documentation:
            found |= (
                set(_in_string(node.value, is_member)) if isinstance(node.value, str) else set()
            )
    return found


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The names that a module imports, and what each is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield (
                    each.asname or each.name.partition(".")[0],
                    (each.name if each.asname else each.name.partition(".")[0]),
                )
                yield each.name, each.name
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def _is_of_torch(name: str) -> bool:
    root, *rest = name.split(".")
    return root == "torch" and any(map(is_private, rest))


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _chain(node: ast.Attribute, imported: dict[str, str]) -> list[str]:
    """`["torch", "_C", "x"]` of `torch._C.x`, by whatever name torch was imported."""
    names: list[str] = []
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute):
        names.insert(0, inner.attr)
        inner = inner.value
    root = inner.id if isinstance(inner, ast.Name) else ""
    # Modules of ours give the operators of ATen this name.
    known = {"aten": "torch.ops.aten", **imported}
    return [*known.get(root, "").split("."), *names]


def _named(chain: list[str]) -> set[str]:
    """The private name in a chain that begins with torch, and what it is asked for."""
    if chain[:2] == ["torch", "ops"]:
        space, name = [*chain[2:4], "", ""][:2]
        return {f"{space}::{name}"} if is_private(space) or is_private(name) else set()
    private = [at for at, name in enumerate(chain) if is_private(name)]
    if not private:
        return set()
    last = private[-1]
    # Of a module, what is in it; of anything else, the name itself.
    is_module = chain[last] == "_C" or len(private) == last == 1
    return {".".join(chain[: last + 2 if is_module else last + 1])}


def _overrides(node: ast.ClassDef) -> Iterator[str]:
    """The methods of a class that derives from another than those of Python."""
    if node.bases:
        yield from (each.name for each in node.body if isinstance(each, ast.FunctionDef))


def _docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _in_string(text: str, is_member: Callable[[str], bool]) -> Iterator[str]:
    operators = _OPERATOR.findall(text)
    for space, name in operators:
        if is_private(space) or is_private(name):
            yield f"{space}::{name}" if name else space
    yield from _DOTTED.findall(text)
    if not operators and re.fullmatch(r"_\w+", text) and is_member(text):
        yield text
