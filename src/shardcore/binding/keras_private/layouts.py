"""Layout maps: the rules in them, and the map of a distribution."""

from collections.abc import Mapping
from typing import Any

from keras.distribution import LayoutMap


def layout_map_of(distribution: Any) -> LayoutMap | None:
    """Returns the layout map of a distribution, None without one."""
    return getattr(distribution, "_layout_map", None)


def entries_of(layout_map: LayoutMap) -> Mapping[str, Any]:
    """Returns the layouts in a map by their keys, as they were given."""
    entries: Mapping[str, Any] = layout_map._layout_map
    return entries
