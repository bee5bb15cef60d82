"""A step as a picture: layers down the page, sharding by colour, collectives beside the layers.

Tensors are small blocks, with this rank's part in the colour of the axis. The style sheets follow
the reader's light or dark page.
"""

from collections.abc import Iterator, Sequence
from html import escape
from math import prod, sqrt
from textwrap import wrap

from shardcore.domain.cost.collectives import Collective, Explained, ExplainedLayer, Phase
from shardcore.domain.inspection import rules_as_code
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.spec import DimSpec, entry_axes
from shardcore.reporting.tables import human_bytes

# The left sides of the columns: layers, tensors, collectives; and the full width.
LAYERS, TENSORS, COLLECTIVES, PAGE = 20, 200, 480, 960
LABEL = 112  # from the left of a block to its label
LINE, LETTER, GAP = 18, 7.3, 12
# The area of the largest tensor of a picture, and the least side of a block.
AREA, LEAST = 2600.0, 10.0
# The height and the least width of a vector.
THIN, SHORT = 4.0, 24.0
# The least and the most times that a block is as wide as it is high.
ASPECT = 0.6, 4.0
# The largest number of parts that is drawn, and the least width of one that gets a line.
MOST_PARTS, LEAST_PART = 8, 3.0
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


def svg(explained: Explained, title: str, summary: str) -> str:
    """Draws the step as a self-contained SVG."""
    most = max([1, *(moved.sent_bytes * moved.times for moved in explained.collectives)])
    largest = max([1, *(tensor[2] for layer in explained.layers for tensor in _tensors(layer))])
    y, shapes = _draw_head(explained, title, summary)
    for name, layer, collectives in _rows(explained):
        shapes.append(f'<path d="M{LAYERS} {y:g}H{PAGE - LAYERS}" class="rule"/>')
        top = bottom = y + GAP
        if layer:
            drawn, bottom = _draw_layer(name, layer, top, explained, largest)
            shapes += drawn
        else:
            shapes.append(_text(LAYERS, top, name, "soft", COLLECTIVES))
        for collective in collectives:
            drawn, top = _draw_collective(top, collective, explained, most)
            shapes += drawn
        y = max(top, bottom, y + GAP + LINE) + GAP
    dimensions = f'viewBox="0 0 {PAGE} {y:g}" width="{PAGE}" height="{y:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {dimensions} role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f'<rect width="{PAGE}" height="{y:g}" class="page"/>{"".join(shapes)}</svg>\n'
    )


def html(title: str, picture: str, table: str) -> str:
    """Builds a page with the picture and the table below it."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}</style></head><body>\n"
        f"{picture}<pre>{escape(table)}</pre>\n</body></html>\n"
    )


def _rows(explained: Explained) -> Iterator[tuple[str, ExplainedLayer | None, list[Collective]]]:
    """Yields a row for each layer, and one for each phase with collectives outside all layers."""
    paths = {layer.path for layer in explained.layers}

    def outside(*phases: Phase) -> Iterator[tuple[str, None, list[Collective]]]:
        rest = [collective for collective in explained.collectives if collective.layer not in paths]
        for phase in phases:
            in_phase = [collective for collective in rest if collective.phase == phase]
            if in_phase:
                yield "loss, several layers" if phase == "backward" else phase, None, in_phase

    yield from outside("batch")
    for layer in explained.layers:
        own = [collective for collective in explained.collectives if collective.layer == layer.path]
        yield layer.path.rpartition("/")[2], layer, own
    yield from outside("forward", "loss and metrics", "backward", "update")


def _tensors(
    layer: ExplainedLayer,
) -> Iterator[tuple[str, tuple[int, ...], int, tuple[DimSpec, ...]]]:
    for variable in layer.variables:
        yield variable.name, variable.shape, variable.bytes, variable.spec
    if layer.shape is not None:
        spec = layer.spec or (None,) * len(layer.shape)
        yield "output", layer.shape, prod(layer.shape) * layer.itemsize, spec


def _draw_layer(
    name: str, layer: ExplainedLayer, y: float, explained: Explained, largest: int
) -> tuple[list[str], float]:
    """Draws the layer's name and its tensors; the number is the bottom of these."""
    indent = LAYERS + 12 * layer.depth
    often = f" x{layer.calls}" if layer.calls > 1 else ""
    shapes = [
        _text(indent, y, name, "head", TENSORS),
        _text(indent, y + LINE, f"{layer.kind}{often}", "soft", TENSORS),
    ]
    bottom = y + 2 * LINE
    for label, shape, count, spec in _tensors(layer):
        sides = _size(shape, count / largest)
        middle = y + max(2.0 * LINE, sides[1] + 6) / 2
        at = TENSORS, middle - sides[1] / 2
        shapes.append(block(*at, sides, spec, explained.mesh, explained.rank))
        sizes = f"{'x'.join(map(str, shape)) or 'scalar'}, {human_bytes(count)}"
        shapes.append(_text(TENSORS + LABEL, middle - LINE, label, "", COLLECTIVES))
        shapes.append(_text(TENSORS + LABEL, middle - 3, sizes, "soft", COLLECTIVES))
        y = 2 * middle - y + 2
        bottom = max(bottom, y)
    return shapes, bottom


def _draw_head(explained: Explained, title: str, summary: str) -> tuple[float, list[str]]:
    mesh, shapes, y = explained.mesh, list[str](), 14
    for line in wrap(title, int((PAGE - 2 * LAYERS) / 9.2)):
        shapes.append(_text(LAYERS, y, line, "title"))
        y += 22
    shapes.append(_text(LAYERS, y, summary))
    names = [("part replicated", "replicated")]
    for axis, count in zip(mesh.axis_names, mesh.shape, strict=True) if mesh else ():
        names.append((f"part {_colour(axis, mesh)}", f"sharded over {axis!r} ({count} ranks)"))
    y, x = y + LINE + GAP, LAYERS
    for kind, label in names:
        width = 44 + round(LETTER * len(label))
        x, y = (x, y) if x + width <= PAGE else (LAYERS, y + LINE)
        shapes.append(f'<rect x="{x}" y="{y + 3}" width="16" height="12" class="{kind}"/>')
        shapes.append(_text(x + 24, y, label, "soft"))
        x += width
    shard = f"coloured: the shard of rank {explained.rank}"
    scale = f"{shard}; areas: bytes of full tensors, tiny ones enlarged"
    shapes.append(_text(LAYERS, y + LINE + 2, scale, "soft"))
    y += 2 * LINE + GAP + 6
    heads = {LAYERS: "layer", TENSORS: "variables and output", COLLECTIVES: "collectives"}
    shapes += [_text(x, y, head, "soft") for x, head in heads.items()]
    return y + LINE + 6, shapes


def _draw_collective(
    y: float, collective: Collective, explained: Explained, most: int
) -> tuple[list[str], float]:
    """Draws a collective with a bar of its bytes, its reason and a remedy, down to the number."""
    sent = collective.times * collective.sent_bytes
    width = max(2.0, (PAGE - LAYERS - COLLECTIVES) * sent / most)
    part = width / max(1, len(collective.axes))
    often = f"{collective.times} times, " if collective.times > 1 else ""
    over = ", ".join(collective.axes) or "a group"
    facts = f"sends {human_bytes(sent)} over {over}, {often}{collective.phase}"
    shapes = [_text(COLLECTIVES, y, collective.kind, "head", PAGE, then=facts)]
    shapes += [
        f'<rect x="{COLLECTIVES + n * part:g}" y="{y + LINE + 3:g}" width="{part:g}" height="5" '
        f'class="{_colour(axis, explained.mesh)}"/>'
        for n, axis in enumerate(collective.axes or ("",))
    ]
    lines = [(line, "soft") for line in _wrapped(collective.reason)]
    for advice in explained.remedies(collective):
        lines += [(line, "bad") for line in _wrapped(f"Avoidable: {rules_as_code(advice.rules)}")]
    for number, (line, kind) in enumerate(lines):
        shapes.append(_text(COLLECTIVES, y + LINE + 9 + number * LINE, line, kind))
    return shapes, y + LINE + 9 + len(lines) * LINE + GAP


def _wrapped(text: str) -> Sequence[str]:
    return wrap(text, int((PAGE - LAYERS - COLLECTIVES) / LETTER))


def _text(x: float, y: float, text: str, kind: str = "", end: int = PAGE, then: str = "") -> str:
    """Writes `text` in the line at `y`, with `then` pale after it, both cut at `end`."""
    most = int((end - x - 8) / LETTER)
    shown, pale = _cut(text, most), _cut(then, most - len(text) - 1)
    named = f' class="{kind}"' if kind else ""
    rest = f'<tspan dx="7" class="soft">{escape(pale)}</tspan>' if pale else ""
    cut = (shown, pale) != (text, then)
    title = f"<title>{escape(f'{text} {then}'.strip())}</title>" if cut else ""
    return f'<text x="{x:g}" y="{y + 13:g}"{named}>{title}{escape(shown)}{rest}</text>'


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…" if most > 1 else ""


def _size(shape: Sequence[int], share: float) -> tuple[float, float]:
    """Computes width and height of a tensor's block: a thin bar for a vector or a scalar.

    Its bytes are `share` times those of the largest tensor.

    Example:
        >>> [round(side) for side in (*_size((64, 256), 1.0), *_size((64, 256), 0.25))]
        [102, 25, 51, 13]
        >>> _size((256,), 0.05), _size((8,), 0.0)
        ((32.5, 4.0), (24.0, 4.0))
    """
    area = AREA * share
    if len(shape) < 2:
        width = min(sqrt(AREA * ASPECT[1]), max(SHORT, area / THIN))
        return width, max(THIN, area / width)
    least, most = ASPECT
    aspect = min(most, max(least, shape[-1] / max(1, prod(shape[:-1]))))
    return max(LEAST, sqrt(area * aspect)), max(LEAST, sqrt(area / aspect))


def _colour(axis: str, mesh: Mesh | None) -> str:
    """Chooses the class of `axis` in the style sheet; a neutral one for an unknown axis.

    Example:
        >>> _colour("model", Mesh((2, 2), ("data", "model")))
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
        _rect(left, top, width, height, f"part {_colour(first, mesh)}"),
    ]
    for axis in others[:1]:  # both colours, in a triangle each
        corners = f"{left:g},{top:g} {left + width:g},{top:g} {left:g},{top + height:g}"
        shapes.append(f'<polygon points="{corners}" class="{_colour(axis, mesh)}"/>')
    lines = [(x + n * width, y, 0.0, sides[1]) for n in range(1, columns) if width >= LEAST_PART]
    lines += [(x, y + n * height, sides[0], 0.0) for n in range(1, rows) if height >= LEAST_PART]
    shapes += [f'<path d="M{a:g} {b:g}l{c:g} {d:g}" class="cut"/>' for a, b, c, d in lines]
    return "".join(shapes)


def _axes(spec: Sequence[DimSpec], mesh: Mesh) -> list[str]:
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
