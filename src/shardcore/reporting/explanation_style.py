"""The style sheets of the pictures: they follow the reader's light or dark page."""

# Per class, what is painted, and in which colours on a light and on a dark page.
COLOURS = {
    "text": ("fill", "#1b1f24", "#e6edf3"),
    ".soft": ("fill", "#57606a", "#9198a1"),
    ".bad": ("fill", "#cf222e", "#ff7b72"),
    ".page": ("fill", "#ffffff", "#0d1117"),
    ".band": ("fill", "#f6f8fa", "#151b23"),
    ".whole": ("fill", "#c9d1d9", "#4b535d"),
    ".part, .chip": ("stroke", "#d0d7de", "#3d444d"),
    ".others, .cut": ("stroke", "#57606a", "#9198a1"),
    ".forced": ("stroke", "#cf222e", "#ff7b72"),
    ".axis0": ("fill", "#2f6fde", "#6ea0f5"),
    ".axis1": ("fill", "#d97706", "#f0a94a"),
    ".axis2": ("fill", "#2e9e5b", "#5cc98a"),
    ".axis3": ("fill", "#9b51c9", "#c58af0"),
}
SHAPES = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre; }
.head { font-weight: bold; } .title { font-weight: bold; font-size: 15px; }
.others, .chip { fill: none; } .cut { stroke-width: 0.7; } .forced { stroke-width: 1.6; }
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
