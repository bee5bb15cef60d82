"""Tensors as small blocks in a picture: split as they are, this rank's part in the axis' colour."""

from collections.abc import Sequence
from html import escape
from math import prod

import attrs

from shardcore.domain.mesh import Mesh
from shardcore.domain.spec import DimSpec, entry_axes

WIDTH, HEIGHT = 34, 20
# More parts than this are drawn as this many.
MOST_PARTS = 8


@attrs.frozen
class Colours:
    """The class of each mesh axis in the style sheet of a picture.

    Example:
        >>> Colours(("data", "model")).of("model")
        'axis1'
    """

    axes: tuple[str, ...]

    def of(self, axis: str) -> str:
        """The class of `axis`; that of no axis for one that is unknown."""
        return f"axis{self.axes.index(axis) % 4}" if axis in self.axes else "whole"


@attrs.frozen
class _Split:
    """How a side of a block is split: into how many parts, which is this rank's, by which axes."""

    parts: int
    own: int
    axes: tuple[str, ...]


def block(x: float, y: float, spec: Sequence[DimSpec], mesh: Mesh | None, rank: int) -> str:
    """A block at `x`, `y`: its last dim is drawn across, the other dims down.

    Args:
        x: Its left side.
        y: Its top.
        spec: Per tensor dim the mesh axes that split it.
        mesh: The mesh, None where nothing is distributed.
        rank: The rank whose part is coloured.
    """
    across = _split(spec[-1:], mesh, rank)
    down = _split(spec[:-1], mesh, rank)
    if mesh is None or not (across.axes or down.axes):
        return _rect(x, y, WIDTH, HEIGHT, "part whole")
    colours = Colours(mesh.axis_names)
    width, height = WIDTH / across.parts, HEIGHT / down.parts
    shapes = [_rect(x, y, WIDTH, HEIGHT, "part others")]
    left, top = x + across.own * width, y + down.own * height
    first, *others = (*across.axes, *down.axes)
    shapes.append(_rect(left, top, width, height, f"part {colours.of(first)}"))
    for axis in others[:1]:  # both colours, in a triangle each
        corners = f"{left:g},{top:g} {left + width:g},{top:g} {left:g},{top + height:g}"
        shapes.append(f'<polygon points="{corners}" class="{colours.of(axis)}"/>')
    lines = [(x + n * width, y, 0, HEIGHT) for n in range(1, across.parts)]
    lines += [(x, y + n * height, WIDTH, 0) for n in range(1, down.parts)]
    shapes += [f'<path d="M{a:g} {b:g}l{c:g} {d:g}" class="cut"/>' for a, b, c, d in lines]
    return "".join(shapes)


def _split(spec: Sequence[DimSpec], mesh: Mesh | None, rank: int) -> _Split:
    axes = tuple(axis for entry in spec for axis in entry_axes(entry))
    if mesh is None or not axes:
        return _Split(1, 0, ())
    at = dict(zip(mesh.axis_names, mesh.coordinate(rank), strict=True))
    parts, own = prod(mesh.axis_size(axis) for axis in axes), 0
    for axis in axes:
        own = own * mesh.axis_size(axis) + at[axis]
    if parts > MOST_PARTS:
        return _Split(MOST_PARTS, own * MOST_PARTS // parts, axes)
    return _Split(parts, own, axes if parts > 1 else ())


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} class="{escape(kind)}"/>'
