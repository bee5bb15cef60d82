"""Patches: `LayoutMap` and `TensorLayout`, whose rules `PathRules` matches."""

import math
from typing import Any

from keras.distribution import LayoutMap, ModelParallel, TensorLayout

from shardcore.binding import keras_private
from shardcore.binding.keras_private.patches import replaces, replaces_value
from shardcore.binding.types import Original
from shardcore.domain.errors import LayoutError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.path_keys import PathKey
from shardcore.domain.layouts.path_rules import PathRules
from shardcore.domain.layouts.spec import DimSpec, entry_axes
from shardcore.ports.types import LayoutLike


def rules_of(layout_map: LayoutMap) -> PathRules[Any]:
    """Parses the rules of a `LayoutMap`; again when its keys have changed."""
    entries = keras_private.entries_of(layout_map)
    keys = tuple(entries)
    cached = getattr(layout_map, "_shardcore_rules", None)
    if cached is None or tuple(cached) != keys:
        cached = PathRules(entries)
        layout_map._shardcore_rules = cached
    return cached


@replaces_value(
    "keras.src.distribution.distribution_lib:ModelParallel.num_model_replicas",
    reason="Knows one axis of the batch.",
    since=(3, 15),
)
def replicas_over_all_axes(_original: property) -> property:
    """Replaces `ModelParallel.num_model_replicas`: `batch_dim_name` may be several axes."""
    return property(_replicas)


def _replicas(distribution: ModelParallel) -> int:
    mesh, axes = distribution.device_mesh, entry_axes(distribution.batch_dim_name)
    if unknown := [axis for axis in axes if axis not in mesh.axis_names]:
        raise LayoutError(
            f"batch_dim_name={distribution.batch_dim_name!r} names axis {unknown[0]!r}, but the "
            f"axes of the mesh are {mesh.axis_names}: name the axis that shards the batch.",
            name=distribution.batch_dim_name,
        )
    return math.prod(mesh.shape[mesh.axis_names.index(axis)] for axis in axes)


@replaces(
    "keras.src.distribution.distribution_lib:ModelParallel.__init__",
    reason="Looks up one axis of the batch.",
    since=(3, 14),
    until=(3, 14),
)
def create_model_parallel(
    original: Original,
    distribution: ModelParallel,
    *,
    batch_dim_name: DimSpec = None,
    **options: object,
) -> None:
    """Replaces `ModelParallel.__init__` of Keras 3.14: `batch_dim_name` may be several axes."""
    first, *others = entry_axes(batch_dim_name) or (None,)
    original(distribution, batch_dim_name=first, **options)
    if others:
        keras_private.set_batch_axes(distribution, batch_dim_name)


@replaces(
    "keras.src.distribution.distribution_lib:LayoutMap.__getitem__",
    reason="`PathRules` matches rules, the same for Keras and PyTorch names.",
)
def lookup(_original: Original, layout_map: LayoutMap, key: str) -> Any:
    """Replaces `LayoutMap.__getitem__`: exact, then pattern; None if no rule matches."""
    match = rules_of(layout_map).match(key)
    return None if match is None else match.value


@replaces(
    "keras.src.distribution.distribution_lib:LayoutMap.__setitem__",
    reason="A malformed rule raises at once.",
)
def add_rule(original: Original, layout_map: LayoutMap, key: str, layout: LayoutLike) -> None:
    """Replaces `LayoutMap.__setitem__`: refuses a malformed key, and leaves the map unchanged."""
    PathKey(key)
    try:
        original(layout_map, key, layout)
    except LayoutError as error:
        raise LayoutError(f"Rule {key!r}: {error}", name=key) from None
    layout_map._shardcore_rules = None


@replaces(
    "keras.src.distribution.distribution_lib:TensorLayout._validate_axes",
    reason="Refuses several axes on one dim; an axis used twice passes.",
)
def validate_axes(_original: Original, tensor_layout: TensorLayout) -> None:
    """Replaces `TensorLayout._validate_axes`: several axes may shard one dim, each axis once."""
    device_mesh = tensor_layout.device_mesh
    if device_mesh is None:
        return
    mesh = Mesh(device_mesh.shape, device_mesh.axis_names)
    try:
        Layout(mesh, tensor_layout.axes)
    except LayoutError as error:
        # The first words of the error of Keras.
        raise LayoutError(f"Invalid axis names for Layout. {error}") from None
