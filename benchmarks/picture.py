"""Draws the results of README.md: the time of a step by hand, on JAX, and by shardcore.

python -m benchmarks.picture    # writes docs/images/results.svg
"""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "images" / "results.svg"

# The contenders by column of the table, with their colours.
COLORS = {"PyTorch by hand": "#768390", "Keras on JAX": "#e0823d", "shardcore, captured": "#2f81f7"}
ROW = re.compile(r"^\| (?P<name>[^|]+, [^|]+) \| (?P<times>.*\d m?s\b.*) \|$", re.MULTILINE)
TIME = re.compile(r"([\d.]+) (m?s)\b")
# In units of the picture: the width of a bar of 1.0, the height of a bar, of a model's bars.
UNIT, BAR, GROUP = 230, 13, 58
LEFT, TOP = 190, 40


def results(readme: str) -> dict[str, list[float | None]]:
    """The seconds of each contender, by model; None if it was not compared."""
    return {
        row["name"]: [_seconds(cell) for cell in row["times"].split(" | ")[: len(COLORS)]]
        for row in ROW.finditer(readme)
    }


def _seconds(cell: str) -> float | None:
    time = TIME.search(cell)
    return float(time[1]) * (1e-3 if time[2] == "ms" else 1) if time else None


def svg(rows: dict[str, list[float | None]]) -> str:
    """The picture: bars in units of the step that is written by hand."""
    height = TOP + GROUP * len(rows)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="13" fill="#768390">',
            "  <title>The time of a step, relative to PyTorch by hand; shorter is better</title>",
            *_legend(),
            *_bars(rows),
            "</svg>\n",
        ]
    )


def _legend() -> Iterator[str]:
    for number, (name, color) in enumerate(COLORS.items()):
        x = LEFT + 150 * number
        yield f'  <rect x="{x}" y="8" width="12" height="12" fill="{color}"/>'
        yield f'  <text x="{x + 18}" y="19">{name}</text>'


def _bars(rows: dict[str, list[float | None]]) -> Iterator[str]:
    for row, (name, seconds) in enumerate(rows.items()):
        y = TOP + GROUP * row
        yield f'  <text x="{LEFT - 12}" y="{y + 24}" text-anchor="end">{name}</text>'
        by_hand = seconds[0]
        assert by_hand is not None, f"{name} has no time by hand"
        for time, color in zip(seconds, COLORS.values(), strict=True):
            if time is not None:
                width = time / by_hand * UNIT
                yield f'  <rect x="{LEFT}" y="{y}" width="{width:.0f}" height="{BAR - 2}" ' + (
                    f'fill="{color}"/>'
                )
                label = f"{time * 1e3:.0f} ms" if time < 1 else f"{time:.2f} s"
                x = LEFT + width + 6
                yield f'  <text x="{x:.0f}" y="{y + 10}" font-size="11">{label}</text>'
            y += BAR


if __name__ == "__main__":
    PICTURE.write_text(svg(results(README.read_text())))
