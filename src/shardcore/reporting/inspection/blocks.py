"""Tensors as small blocks in a picture, with this rank's part in the colour of the axis.

The style sheets follow the reader's light or dark page.
"""

from collections.abc import Sequence
from html import escape
from math import prod, sqrt

from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.spec import DimSpec, entry_axes

# The area of the largest tensor of a picture, and the least side of a block.
AREA, LEAST = 2600.0, 10.0
# The height and the least width of a vector.
THIN, SHORT = 4.0, 24.0
# The least and the most times that a block is as wide as it is high.
ASPECT = 0.6, 4.0
# The largest number of parts that is drawn, and the least width of one that gets a line.
MOST_PARTS, LEAST_PART = 8, 3.0


def size(shape: Sequence[int], share: float) -> tuple[float, float]:
    """Computes width and height of a tensor's block: a thin bar for a vector or a scalar.

    Args:
        shape: Its global shape.
        share: Its bytes, as a part of those of the largest tensor.

    Example:
        >>> [round(side) for side in (*size((64, 256), 1.0), *size((64, 256), 0.25))]
        [102, 25, 51, 13]
        >>> size((256,), 0.05), size((8,), 0.0)
        ((32.5, 4.0), (24.0, 4.0))
    """
    area = AREA * share
    if len(shape) < 2:
        width = min(sqrt(AREA * ASPECT[1]), max(SHORT, area / THIN))
        return width, max(THIN, area / width)
    least, most = ASPECT
    aspect = min(most, max(least, shape[-1] / max(1, prod(shape[:-1]))))
    return max(LEAST, sqrt(area * aspect)), max(LEAST, sqrt(area / aspect))


def colour(axis: str, mesh: Mesh | None) -> str:
    """Chooses the class of `axis` in the style sheet; a neutral one for an unknown axis.

    Example:
        >>> colour("model", Mesh((2, 2), ("data", "model")))
        'axis1'
    """
    known = mesh is not None and axis in mesh.axis_names
    return f"axis{mesh.axis_index(axis) % 4}" if mesh and known else "replicated"


def block(
    x: float, y: float, sides: tuple[float, float], spec: Sequence[DimSpec], mesh: Mesh | None,
    rank: int,
) -> str:  # fmt: skip
    """Draws a block at `x`, `y`: its last dim is drawn across, the other dims down.

    Args:
        x: Its left side.
        y: Its top.
        sides: Its width and height.
        spec: Per tensor dim the mesh axes that shard it.
        mesh: The mesh, None if nothing is distributed.
        rank: The rank whose part is coloured.
    """
    if mesh is None or not _axes(spec, mesh):
        return _rect(x, y, *sides, "part replicated")
    (columns, column), (rows, row) = (_parts(dims, mesh, rank) for dims in (spec[-1:], spec[:-1]))
    width, height = sides[0] / columns, sides[1] / rows
    left, top = x + column * width, y + row * height
    first, *others = (*_axes(spec[-1:], mesh), *_axes(spec[:-1], mesh))
    shapes = [
        _rect(x, y, *sides, "part others"),
        _rect(left, top, width, height, f"part {colour(first, mesh)}"),
    ]
    for axis in others[:1]:  # both colours, in a triangle each
        corners = f"{left:g},{top:g} {left + width:g},{top:g} {left:g},{top + height:g}"
        shapes.append(f'<polygon points="{corners}" class="{colour(axis, mesh)}"/>')
    lines = [(x + n * width, y, 0.0, sides[1]) for n in range(1, columns) if width >= LEAST_PART]
    lines += [(x, y + n * height, sides[0], 0.0) for n in range(1, rows) if height >= LEAST_PART]
    shapes += [f'<path d="M{a:g} {b:g}l{c:g} {d:g}" class="cut"/>' for a, b, c, d in lines]
    return "".join(shapes)


def _axes(spec: Sequence[DimSpec], mesh: Mesh) -> list[str]:
    """Lists the axes that shard a dim of `spec` and have several ranks."""
    axes = (axis for entry in spec for axis in entry_axes(entry))
    return [axis for axis in axes if mesh.axis_size(axis) > 1]


def _parts(spec: Sequence[DimSpec], mesh: Mesh, rank: int) -> tuple[int, int]:
    """Counts the parts of a side of a block; the second number is the index of the rank's part."""
    at = dict(zip(mesh.axis_names, mesh.coordinate(rank), strict=True))
    parts, own = 1, 0
    for axis in _axes(spec, mesh):
        parts, own = parts * mesh.axis_size(axis), own * mesh.axis_size(axis) + at[axis]
    return (MOST_PARTS, own * MOST_PARTS // parts) if parts > MOST_PARTS else (parts, own)


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} class="{escape(kind)}"/>'


# Per class the property, and its colours on a light and on a dark page.
COLOURS = {
    "text": ("fill", "#1b1f24", "#e6edf3"),
    ".soft": ("fill", "#57606a", "#9198a1"),
    ".bad": ("fill", "#cf222e", "#ff7b72"),
    ".page": ("fill", "#ffffff", "#0d1117"),
    ".replicated": ("fill", "#c9d1d9", "#4b535d"),
    ".part, .rule": ("stroke", "#d0d7de", "#3d444d"),
    ".others, .cut": ("stroke", "#57606a", "#9198a1"),
    ".axis0": ("fill", "#2f6fde", "#6ea0f5"),
    ".axis1": ("fill", "#d97706", "#f0a94a"),
    ".axis2": ("fill", "#2e9e5b", "#5cc98a"),
    ".axis3": ("fill", "#9b51c9", "#c58af0"),
}
SHAPES = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre; }
.head { font-weight: bold; } .title { font-weight: bold; font-size: 15px; }
.head .soft { font-weight: normal; } .others { fill: none; } .cut { stroke-width: 0.7; }
"""
LIGHT, DARK = (
    " ".join(f"{name} {{ {what}: {pair[number]}; }}" for name, (what, *pair) in COLOURS.items())
    for number in (0, 1)
)
STYLE = f"{SHAPES}{LIGHT}\n@media (prefers-color-scheme: dark) {{ {DARK} }}\n"
PAGE_STYLE = """
body { margin: 0; font: 13px ui-monospace, Menlo, Consolas, monospace; background: #fff; }
svg { max-width: 100%; height: auto; } pre { padding: 16px; overflow-x: auto; color: #1b1f24; }
@media (prefers-color-scheme: dark) { body { background: #0d1117; } pre { color: #e6edf3; } }
"""
