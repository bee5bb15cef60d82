"""Seams: `LayoutMap` and `TensorLayout`. Rules are read by the path matcher."""

from collections.abc import Callable
from typing import Any

from shardcore.domain.errors import LayoutError
from shardcore.domain.layout import Layout
from shardcore.domain.mesh import Mesh
from shardcore.domain.paths.key import PathKey
from shardcore.domain.paths.rules import PathRules


def rules_of(layout_map: Any) -> PathRules[Any]:
    """The rules of a `LayoutMap`. Made again when its keys have changed."""
    keys = tuple(layout_map._layout_map)
    cached = getattr(layout_map, "_shardcore_rules", None)
    if cached is None or tuple(cached) != keys:
        cached = PathRules(layout_map._layout_map)
        layout_map._shardcore_rules = cached
    return cached


def lookup(_original: Callable[..., Any], layout_map: Any, key: str) -> Any:
    """`LayoutMap.__getitem__`: exact, then pattern; None if no rule matches."""
    match = rules_of(layout_map).match(key)
    return None if match is None else match.value


def add_rule(original: Callable[..., None], layout_map: Any, key: str, layout: Any) -> None:
    """`LayoutMap.__setitem__`: a key that cannot be read is refused, and the map is as before."""
    PathKey(key)
    try:
        original(layout_map, key, layout)
    except LayoutError as error:
        raise LayoutError(f"Rule {key!r}: {error}") from None
    layout_map._shardcore_rules = None


def validate_axes(_original: Callable[..., None], tensor_layout: Any) -> None:
    """`TensorLayout._validate_axes`: several axes may split one dim, each axis once."""
    device_mesh = tensor_layout.device_mesh
    if device_mesh is None:
        return
    mesh = Mesh(device_mesh.shape, device_mesh.axis_names)
    try:
        Layout(mesh, tensor_layout.axes)
    except LayoutError as error:
        # The words by which Keras' own error is known.
        raise LayoutError(f"Invalid axis names for Layout. {error}") from None
