"""Writes the names of Keras that shardcore replaces into a page: `python -m tests.patches`."""

from collections.abc import Iterator

from shardcore.binding import patch_table
from shardcore.binding.keras_private.patches import OLDEST, Patch, Replacement
from tests import generated
from tests.checks.tree import ROOT

PAGE = ROOT / "docs" / "reference" / "patches.md"
INSTALLED = "<!-- patches: python -m tests.patches -->", "<!-- end of patches -->"
TEMPORARY = "<!-- patches in a context: python -m tests.patches -->", "<!-- end of contexts -->"


def table(replacements: tuple[Replacement, ...]) -> Iterator[str]:
    """Yields a row for each name, sorted."""
    yield "| name in Keras | lines of Keras | why it is replaced | what replaces it |"
    yield "|---|---|---|---|"
    for replacement in sorted(replacements, key=lambda replacement: replacement.patch.name):
        patch, function = replacement.patch, replacement.function
        file = function.__module__.removeprefix("shardcore.").replace(".", "/") + ".py"
        where = f"`{function.__qualname__}` in `{file}`"
        reason = patch.reason.replace("_", r"\_")  # `__call__` would be bold
        yield f"| `{patch.name}` | {lines(patch)} | {reason} | {where} |"


def lines(patch: Patch) -> str:
    """Returns the lines of Keras in which a name is replaced."""
    since, until = (".".join(map(str, line or ())) for line in (patch.since, patch.until))
    if not until:
        return "all" if patch.since == OLDEST else f"from {since}"
    return since if since == until else f"{since} to {until}"


def write() -> None:
    generated.write(PAGE, *INSTALLED, table(patch_table.INSTALLED))
    generated.write(PAGE, *TEMPORARY, table(patch_table.TEMPORARY))


def is_up_to_date() -> bool:
    text = PAGE.read_text()
    return text == generated.text(PAGE, *INSTALLED, table(patch_table.INSTALLED)) and (
        text == generated.text(PAGE, *TEMPORARY, table(patch_table.TEMPORARY))
    )


if __name__ == "__main__":
    write()
