"""Writes the table of pure modules into a page: `python -m tests.pure_modules`."""

from pathlib import Path

from shardcore.binding.capture.python_state.known_modules import PURE_MODULES

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "captured.md"
BEGIN = "<!-- pure modules: python -m tests.pure_modules -->\n"
END = "<!-- end of pure modules -->"


def table():
    """Returns the modules and the reason of each, as a table of Markdown."""
    rows = [f"| `{module}` | {reason} |" for module, reason in sorted(PURE_MODULES.items())]
    return "\n".join(["| module | its code |", "|---|---|", *rows]) + "\n"


def page():
    """Returns the page with today's table."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(page())
