"""Nested structures of Keras, and the masks of the tensors in them."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from keras.src import tree
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator as EpochIterator


def map_tensors(function: Callable[[Any], object], structure: object) -> Any:
    """Returns `structure` with `function` applied to its tensors; the rest stays."""
    return tree.map_structure(
        lambda leaf: function(leaf) if keras.ops.is_tensor(leaf) else leaf, structure
    )


def leaves(structure: object) -> list[Any]:
    """Returns the leaves of `structure`, None among them."""
    flat: list[Any] = tree.flatten(structure)
    return flat


def map_leaves(function: Callable[[Any], object], structure: object) -> Any:
    """Returns `structure` with `function` applied to every leaf but None."""
    return tree.map_structure(function, structure, none_is_leaf=False)


def map_pairs(function: Callable[[Any, Any], object], one: object, other: object) -> Any:
    """Returns the results of `function` for the leaves of two equal structures; None stays."""
    return tree.map_structure(function, one, other, none_is_leaf=False)


def pack_leaves(structure: object, flat: Sequence[object]) -> Any:
    """Returns the leaves `found` in the nesting of `structure`."""
    return tree.pack_sequence_as(structure, flat)


def copy_mask(source: torch.Tensor, target: torch.Tensor) -> None:
    """Gives `target` the Keras mask of `source`, if it has one."""
    mask = get_keras_mask(source)
    if mask is not None:
        set_keras_mask(target, mask)
