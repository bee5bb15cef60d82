"""Nests of tensors, and their masks."""

from collections.abc import Callable
from typing import Any

from keras.src import backend, tree


def map_tensors(function: Callable[[Any], Any], structure: Any) -> Any:
    """`structure` with `function` applied to its tensors; the rest stays."""
    return tree.map_structure(
        lambda leaf: function(leaf) if backend.is_tensor(leaf) else leaf, structure
    )


def leaves(structure: Any) -> list[Any]:
    """The leaves of `structure`, None among them."""
    found: list[Any] = tree.flatten(structure)
    return found


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """`structure` with `function` applied to every leaf but None."""
    return tree.map_structure(function, structure, none_is_leaf=False)


def copy_mask(source: Any, target: Any) -> None:
    """Give `target` the Keras mask of `source`, if it has one."""
    mask = backend.get_keras_mask(source)
    if mask is not None:
        backend.set_keras_mask(target, mask)
