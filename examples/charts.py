"""Draws what a program of the gallery did: losses as lines, stored bytes as bars, and its step."""

import re
from html import escape

# In units of the picture: its width, that of explain(); and the height of what is above the step.
PAGE, HEAD = 960, 240
# Left, top, width and height of the axes of the lines; left, top and full width of the bars.
LINES, BARS = (56, 44, 380, 150), (500, 44, 400)
# Those of explain() for its first two mesh axes: a colour on light pages and on dark ones.
STYLE = """
.one { fill: none; stroke: #f0a94a; stroke-width: 7; } .two { fill: none; stroke: #2f6fde; }
.two { stroke-width: 2; } .frame { fill: none; stroke: #8b949e; stroke-width: 0.7; }
.stored { fill: #2f6fde; } .states { fill: #f0a94a; }
"""


def picture(title, losses, stored, step):
    """Draws the losses and the bytes above the SVG of a step.

    Args:
        title: The first line.
        losses: By name the losses of the epochs on one device, and those on two ranks.
        stored: By label the bytes of the weights, and those of the optimizers' states.
        step: The SVG that `explain` has drawn.
    """
    height = HEAD + float(re.search(r'height="([\d.]+)"', step)[1])
    shapes = [_text(20, 24, title, "title"), *_lines(losses), *_bars(stored)]
    tooltips = re.compile(r"(?<=.)<title>.*?</title>")
    rounded = re.sub(r'="(\d+)\.\d+"', r'="\1"', tooltips.sub("", step))  # a smaller file
    below = rounded.replace("<svg ", f'<svg y="{HEAD}" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PAGE} {height:g}" '
        f'width="{PAGE}" height="{height:g}" role="img"><title>{escape(title)}</title>'
        f'<style>{STYLE}</style><rect width="{PAGE}" height="{height:g}" class="page"/>'
        f"{''.join(shapes)}{below}</svg>\n"
    )


def _lines(losses):
    left, top, width, height = LINES
    values = [value for pair in losses.values() for line in pair for value in line]
    most, least = max(values), min(0, *values)
    yield f'<rect x="{left}" y="{top}" width="{width}" height="{height}" class="frame"/>'
    yield _text(left - 8, top + 10, f"{most:.2f}", "soft", "end")
    yield _text(left - 8, top + height, f"{least:.2f}", "soft", "end")
    for name, pair in losses.items():
        for line, kind in zip(pair, ("one", "two"), strict=True):
            points = [
                (
                    left + width * epoch / max(1, len(line) - 1),
                    top + height * (most - value) / (most - least),
                )
                for epoch, value in enumerate(line)
            ]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            yield f'<polyline points="{path}" class="{kind}"/>'
        yield _text(points[-1][0] - 6, points[-1][1] - 8, name, "soft", "end")
    epochs = len(line)
    yield _text(left, top + height + 18, f"epochs 1 to {epochs}: broad, one device;", "soft")
    yield _text(left, top + height + 34, "thin, two ranks", "soft")


def _bars(stored):
    left, top, full = BARS
    most = max(sum(pair) for pair in stored.values())
    yield _text(left, top - 2, "stored: weights (blue), states of the optimizer", "soft")
    for label, pair in stored.items():
        x = left
        yield _text(left, top + 26, f"{label}: {sum(pair) / 2**20:.2f} MiB")
        for count, kind in zip(pair, ("stored", "states"), strict=True):
            width = full * count / most
            size = f'width="{width:.1f}" height="14"'
            yield f'<rect x="{x:.1f}" y="{top + 32}" {size} class="{kind}"/>'
            x += width
        top += 50


def _text(x, y, text, kind="", anchor="start"):
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} class="{kind}">{escape(text)}</text>'
