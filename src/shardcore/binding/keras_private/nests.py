"""Nested structures of Keras, and the masks of the tensors in them."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from keras.src import tree
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask


def map_tensors(function: Callable[[Any], object], structure: object) -> Any:
    """Applies `function` to the tensors of `structure`; the rest stays."""
    return tree.map_structure(
        lambda leaf: function(leaf) if keras.ops.is_tensor(leaf) else leaf, structure
    )


def leaves(structure: object) -> list[Any]:
    """Flattens `structure`; a None in it is a leaf."""
    flat: list[Any] = tree.flatten(structure)
    return flat


def map_leaves(function: Callable[[Any], object], structure: object) -> Any:
    """Applies `function` to every leaf of `structure` but None."""
    return tree.map_structure(function, structure, none_is_leaf=False)


def map_pairs(function: Callable[[Any, Any], object], one: object, other: object) -> Any:
    """Applies `function` to the leaves of two equal structures; None stays."""
    return tree.map_structure(function, one, other, none_is_leaf=False)


def pack_leaves(structure: object, flat: Sequence[object]) -> Any:
    """Nests the leaves `flat` as those of `structure`."""
    return tree.pack_sequence_as(structure, flat)


def copy_mask(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies the Keras mask of `source`, if it has one."""
    mask = get_keras_mask(source)
    if mask is not None:
        set_keras_mask(target, mask)
