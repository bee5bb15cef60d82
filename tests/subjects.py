"""The folders of each subject in each layer, as a table in docs/explanation/design.md.

python -m tests.subjects    # writes the table

A subject has one name in all layers: a folder, or a module where one file is enough.
"""

from collections.abc import Iterator
from pathlib import Path

from tests import generated

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "shardcore"
PAGE = ROOT / "docs" / "explanation" / "design.md"
BEGIN, END = "<!-- run: python -m tests.subjects -->", "<!-- end of run -->"

SUBJECTS = ("layouts", "engine", "capture", "checkpoints", "ranks", "cost", "inspection")
LAYERS = ("domain", "ports", "adapters", "binding", "bootstrap", "reporting", "cli")


def files(layer: str, subject: str) -> list[Path]:
    """Lists the modules that a layer has of a subject."""
    folder = SOURCE / layer / subject
    modules = [file for file in sorted(folder.rglob("*.py")) if file.name != "__init__.py"]
    return modules or [file for file in [folder.with_suffix(".py")] if file.exists()]


def table() -> Iterator[str]:
    """Yields the lines of the table."""
    yield f"| subject | {' | '.join(f'`{layer}`' for layer in LAYERS)} |"
    yield f"|---{'|--:' * len(LAYERS)}|"
    for subject in SUBJECTS:
        counts = (str(len(files(layer, subject)) or "") for layer in LAYERS)
        yield f"| `{subject}` | {' | '.join(counts)} |"


if __name__ == "__main__":
    generated.write(PAGE, BEGIN, END, table())
