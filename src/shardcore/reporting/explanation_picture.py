"""A step as a picture: layers down the page, sharding by colour, collectives beside the layers."""

from collections.abc import Iterable, Iterator
from html import escape
from textwrap import wrap

from shardcore.domain.explanation.collectives import Collective, Explained, ExplainedLayer, Phase
from shardcore.domain.mesh import Mesh
from shardcore.reporting.explanation_blocks import PAGE_STYLE, STYLE, WIDTH, block, colour
from shardcore.reporting.tables import human_bytes

# The left sides of the columns: layers, variables, outputs, both passes; and the full width.
LAYERS, VARIABLES, OUTPUTS, FORWARD, BACKWARD, PAGE = 16, 300, 560, 790, 1060, 1330
LINE, LETTER = 26, 7.3


def svg(explained: Explained, title: str, summary: str, advice: Iterable[str]) -> str:
    """Returns the picture as a self-contained SVG."""
    y, shapes = _head(explained, title, summary, advice)
    for number, (name, layer, collectives) in enumerate(_rows(explained)):
        columns: dict[int, list[Collective]] = {FORWARD: [], BACKWARD: []}
        for each in collectives:
            columns[BACKWARD if each.phase in ("backward", "update") else FORWARD].append(each)
        variables = len(layer.variables) if layer else 0
        height = LINE * max(1, variables, *map(len, columns.values())) + 4
        if number % 2 == 0:
            shapes.append(f'<rect y="{y}" width="{PAGE}" height="{height}" class="band"/>')
        for x, found in columns.items():
            for line, each in enumerate(found):
                forced = explained.is_avoidable(each)
                shapes.append(_chip(x, y + 3 + line * LINE, each, explained.mesh, forced))
        shapes += _layer(name, layer, y, explained) if layer else [_text(LAYERS, y, name, "soft")]
        y += height
    size = f'viewBox="0 0 {PAGE} {y + 10}" width="{PAGE}" height="{y + 10}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f'<rect width="{PAGE}" height="{y + 10}" class="page"/>{"".join(shapes)}</svg>\n'
    )


def html(title: str, picture: str, table: str) -> str:
    """Returns a page with the picture and the table below it."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}</style></head><body>\n"
        f"{picture}<pre>{escape(table)}</pre>\n</body></html>\n"
    )


def _rows(explained: Explained) -> Iterator[tuple[str, ExplainedLayer | None, list[Collective]]]:
    """Yields a row for each layer, and one for each phase with collectives outside all layers."""
    paths = {layer.path for layer in explained.layers}

    def outside(*phases: Phase) -> Iterator[tuple[str, None, list[Collective]]]:
        rest = [each for each in explained.collectives if each.layer not in paths]
        for phase in phases:
            found = [each for each in rest if each.phase == phase]
            if found:
                yield "loss, several layers" if phase == "backward" else phase, None, found

    yield from outside("batch")
    for layer in explained.layers:
        own = [each for each in explained.collectives if each.layer == layer.path]
        yield layer.path.rpartition("/")[2], layer, own
    yield from outside("forward", "loss and metrics", "backward", "update")


def _layer(name: str, layer: ExplainedLayer, y: int, explained: Explained) -> Iterator[str]:
    """Yields the layer's name, its variables and its output."""
    mesh, rank = explained.mesh, explained.rank
    indent = LAYERS + 12 * layer.depth
    often = f" x{layer.calls}" if layer.calls > 1 else ""
    yield _text(indent, y, name, then=f"{layer.kind}{often}", room=VARIABLES - indent)
    for number, variable in enumerate(layer.variables):
        at = y + number * LINE
        yield block(VARIABLES, at + 4, variable.spec, mesh, rank)
        yield _label(VARIABLES, at, f"{variable.name} {_sizes(variable.shape)}", OUTPUTS)
    if layer.shape is not None:
        spec = layer.spec or (None,) * len(layer.shape)
        yield block(OUTPUTS, y + 4, spec, mesh, rank)
        yield _label(OUTPUTS, y, _sizes(layer.shape), FORWARD)


def _head(
    explained: Explained, title: str, summary: str, advice: Iterable[str]
) -> tuple[int, list[str]]:
    """Returns the top of the first row, and the shapes above it."""
    lines = [_text(LAYERS, 6, title, "title"), _text(LAYERS, 30, summary)]
    y = 54
    for each in advice:
        for line in wrap(each, int((PAGE - 2 * LAYERS) / LETTER)):
            lines.append(_text(LAYERS, y, line, "bad"))
            y += 18
    lines += _legend(y + 4, explained.mesh)
    y += LINE + 10
    heads = ("layer", "its variables", "its output", "forward", "backward and update")
    columns = (LAYERS, VARIABLES, OUTPUTS, FORWARD, BACKWARD)
    lines += [_text(x, y, head, "head") for x, head in zip(columns, heads, strict=True)]
    return y + LINE, lines


def _legend(y: int, mesh: Mesh | None) -> list[str]:
    names = [("part whole", "whole on each rank")]
    for axis, size in zip(mesh.axis_names, mesh.shape, strict=True) if mesh else ():
        names.append((f"part {colour(axis, mesh)}", f"split over {axis!r} ({size})"))
    shapes, x = [], LAYERS
    for kind, label in names:
        shapes.append(f'<rect x="{x}" y="{y + 6}" width="16" height="12" class="{kind}"/>')
        shapes.append(_text(x + 22, y, label, "soft"))
        x += 40 + round(LETTER * len(label)) + 16
    if mesh is not None:
        shapes.append(
            _text(x, y, "coloured: the part of this rank; a frame in red: avoidable", "soft")
        )
    return shapes


def _chip(x: int, y: int, each: Collective, mesh: Mesh | None, forced: bool) -> str:
    """Returns a collective: axes by colour, kind, bytes and count; the reason on hovering."""
    bars = "".join(
        f'<rect x="{x + 5 * n}" y="{y}" width="5" height="{LINE - 6}" class="{kind}"/>'
        for n, kind in enumerate(colour(axis, mesh) for axis in each.axes)
    )
    often = f" x{each.times}" if each.times > 1 else ""
    label = f"{each.kind} {human_bytes(each.operand_bytes)}{often}"
    width, left = BACKWARD - FORWARD - 14, 6 + 5 * max(1, len(each.axes))
    kind = "chip forced" if forced else "chip"
    return (
        f"<g><title>{escape(each.reason)}</title>{bars}"
        f'<rect x="{x}" y="{y}" width="{width}" height="{LINE - 6}" class="{kind}"/>'
        f"{_text(x + left, y - 3, label, then=_of_what(each), room=width - left)}</g>"
    )


def _of_what(each: Collective) -> str:
    """Returns the variables, or the operator, in short."""
    first, *others = each.variables or (
        each.operator.removeprefix("aten.").removesuffix(".default"),
    )
    return first.rpartition("/")[2] + (f" +{len(others)}" if others else "")


def _label(x: int, y: int, text: str, end: int) -> str:
    """Returns the text beside a block at `x`, up to `end`."""
    return _text(x + WIDTH + 8, y, text, room=end - x - WIDTH - 8)


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _text(
    x: float, y: int, text: str, kind: str = "", room: int | None = None, then: str = ""
) -> str:
    """Returns `text` in the line at `y`, with `then` pale after it, both cut to the room."""
    most = len(text) + len(then) if room is None else max(4, int((room - 12) / LETTER))
    shown, pale = _cut(text, most), _cut(then, most - len(text))
    named = f' class="{kind}"' if kind else ""
    rest = f'<tspan dx="7" class="soft">{escape(pale)}</tspan>' if pale else ""
    cut = (shown, pale) != (text, then)
    title = f"<title>{escape(f'{text} {then}'.strip())}</title>" if cut else ""
    return f'<text x="{x:g}" y="{y + 18}"{named}>{title}{escape(shown)}{rest}</text>'


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…" if most > 1 else ""
