"""Nests of operands and results, walked fast: a recording walks each of thousands many times."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch.utils._pytree import SUPPORTED_NODES
from torch.utils._pytree import tree_map as tree_map_of_torch


def tree_leaves(nest: Any) -> list[Any]:
    """The leaves of tuples, lists, dicts, and all else that torch takes apart, in order.

    torch 2.13: its own asks for the kind of each leaf by name, and takes five times as long.

    Example:
        >>> tree_leaves((1, [None, {"a": (2,)}]))
        [1, None, 2]
    """
    found: list[Any] = []
    _gather(nest, found)
    return found


def tree_map(function: Callable[[Any], Any], nest: Any) -> Any:
    """`nest` with what `function` makes of each leaf.

    Example:
        >>> tree_map(str, (1, [None, {"a": (2,)}]))
        ('1', ['None', {'a': ('2',)}])
    """
    kind: Any = type(nest)
    if kind is tuple:
        return tuple([tree_map(function, each) for each in nest])
    if kind is list:
        return [tree_map(function, each) for each in nest]
    if kind is dict:
        return {name: tree_map(function, each) for name, each in nest.items()}
    return tree_map_of_torch(function, nest) if _is_other_node(kind) else function(nest)


def tree_map_only(kind: type | tuple[type, ...], function: Callable[[Any], Any], nest: Any) -> Any:
    """`nest` with what `function` makes of each leaf of a kind.

    Example:
        >>> tree_map_only(int, str, (1, 2.0))
        ('1', 2.0)
    """
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, nest)


def _gather(nest: Any, found: list[Any]) -> None:
    kind: Any = type(nest)
    if kind is tuple or kind is list:
        for each in nest:
            _gather(each, found)
    elif kind is dict:
        for each in nest.values():
            _gather(each, found)
    elif _is_other_node(kind):
        tree_map_of_torch(found.append, nest)
    else:
        found.append(nest)


@cache
def _is_other_node(kind: Any) -> bool:
    """Whether torch takes such a thing apart, as it does named tuples."""
    is_named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_named or kind in SUPPORTED_NODES
