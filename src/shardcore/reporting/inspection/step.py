"""A step as a picture: layers down the page, sharding by colour, collectives beside the layers."""

from collections.abc import Iterator, Sequence
from html import escape
from math import prod
from textwrap import wrap

from shardcore.domain.cost.collectives import Collective, Explained, ExplainedLayer, Phase
from shardcore.domain.inspection import rules_as_code
from shardcore.domain.layouts.spec import DimSpec
from shardcore.reporting.inspection.blocks import PAGE_STYLE, STYLE, block, colour, size
from shardcore.reporting.tables import human_bytes

# The left sides of the columns: layers, tensors, collectives; and the full width.
LAYERS, TENSORS, COLLECTIVES, PAGE = 20, 200, 480, 960
LABEL = 112  # from the left of a block to its label
LINE, LETTER, GAP = 18, 7.3, 12


def svg(explained: Explained, title: str, summary: str) -> str:
    """Draws the step as a self-contained SVG."""
    most = max(
        (collective.sent_bytes * collective.times for collective in explained.collectives),
        default=0,
    )
    largest = max(
        (tensor[2] for layer in explained.layers for tensor in _tensors(layer)), default=0
    )
    y, shapes = _head(explained, title, summary)
    for name, layer, collectives in _rows(explained):
        shapes.append(f'<path d="M{LAYERS} {y:g}H{PAGE - LAYERS}" class="rule"/>')
        top = bottom = y + GAP
        if layer:
            drawn, bottom = _layer(name, layer, top, explained, max(1, largest))
            shapes += drawn
        else:
            shapes.append(_text(LAYERS, top, name, "soft", COLLECTIVES))
        for collective in collectives:
            drawn, top = _collective(top, collective, explained, max(1, most))
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
    """Yields name, shape, bytes and spec of the layer's variables and of its output."""
    for variable in layer.variables:
        yield variable.name, variable.shape, variable.bytes, variable.spec
    if layer.shape is not None:
        spec = layer.spec or (None,) * len(layer.shape)
        yield "output", layer.shape, prod(layer.shape) * layer.itemsize, spec


def _layer(
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
        sides = size(shape, count / largest)
        middle = y + max(2.0 * LINE, sides[1] + 6) / 2
        at = TENSORS, middle - sides[1] / 2
        shapes.append(block(*at, sides, spec, explained.mesh, explained.rank))
        sizes = f"{'x'.join(map(str, shape)) or 'scalar'}, {human_bytes(count)}"
        shapes.append(_text(TENSORS + LABEL, middle - LINE, label, "", COLLECTIVES))
        shapes.append(_text(TENSORS + LABEL, middle - 3, sizes, "soft", COLLECTIVES))
        y = 2 * middle - y + 2
        bottom = max(bottom, y)
    return shapes, bottom


def _head(explained: Explained, title: str, summary: str) -> tuple[float, list[str]]:
    """Draws what is above the first row, whose top is the number."""
    mesh, shapes, y = explained.mesh, list[str](), 14
    for line in wrap(title, int((PAGE - 2 * LAYERS) / 9.2)):
        shapes.append(_text(LAYERS, y, line, "title"))
        y += 22
    shapes.append(_text(LAYERS, y, summary))
    names = [("part replicated", "replicated")]
    for axis, count in zip(mesh.axis_names, mesh.shape, strict=True) if mesh else ():
        names.append((f"part {colour(axis, mesh)}", f"sharded over {axis!r} ({count} ranks)"))
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


def _collective(
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
        f'class="{colour(axis, explained.mesh)}"/>'
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
